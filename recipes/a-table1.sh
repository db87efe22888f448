#!/bin/sh
# Paper A, table 1: is pre-training on another language better than none?
#
# The paper: BERT without pre-training, or with that on Chinese, French (CamemBERT) or English text, fine-tuned on SST-2, MRPC
#   and QNLI.  Chinese and French are far ahead of none, and not far behind English.
# Here: GLUE's development files are the test.  At tiny scale 4 layers x 128 read news in Swahili or Python's documentation.
# Costs: tiny 2 pre-trainings of 1,000 steps and 12 fine-tunings of 2 epochs; paper 48 fine-tunings of 3 epochs.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1} swahili=lm-masakhane-text/swahili_voa.txt
case $SCALE in
tiny)
  tasks="sst mrpc"
  need $swahili https://raw.githubusercontent.com/masakhane-io/masakhane-ner/HEAD/text_by_language/swahili/voa_clean_final.txt
  set -- --grid learning-rate=3e-4,1e-3 --max-length 64 --bucket --epochs "${EPOCHS:-2}"
  ;;
paper)
  tasks="sst-2 mrpc qnli"
  for model in bert-base-chinese camembert-base bert-base-uncased; do need_model $model; done
  set -- --grid learning-rate=1e-5,2e-5,3e-5,5e-5 --max-length 128 --epochs 3
  ;;
esac
need_tasks "$tasks"
ready

models="chinese=bert-base-chinese french=camembert-base english=bert-base-uncased"
if [ "$SCALE" = tiny ]; then
  pack swahili "$(at $swahili)" 4000 128 --sentences line
  swahili=$(run pretrain "$packed" --architecture bert --layers 4 --hidden 128 --heads 4 --learning-rate 1e-3 --warmup-steps 50 \
    --steps "${STEPS:-1000}" --name small-model-swahili)
  small_model
  models="swahili=$swahili english=$init"
fi
for task in $tasks; do
  task "$task"
  english=${models##*english=}
  keep search "$data" "$@" --seeds "$SEEDS" --init "$(at "$english")" --random-init --name "a1-$task-none"
  for model in $models; do
    keep search "$data" "$@" --seeds "$SEEDS" --init "$(at "${model#*=}")" --name "a1-$task-${model%%=*}"
  done
done
report a-table1 --column 'a1-sst*=SST-2' --column 'a1-mrpc-*=MRPC' --column 'a1-qnli-*=QNLI' \
  --row '*-none=No PT (Kovaleva et al., 2019)' --row '*-chinese=Chinese PT (Devlin, 2020)' \
  --row '*-french=French PT (Martin et al., 2019)' --row '*-english=English PT (Devlin et al., 2018a)'
