#!/bin/sh
# Paper C, tables 2 and 3: BERT and ELECTRA whose pre-training focuses on conflicts with mis-predictions (McMisP), on GLUE.
#
# The paper: base size, 16 GB of Wikipedia and books, a million steps of 256 x 512 tokens; the mean of five seeds of the best
#   setting on the development files: BERT 83.0 to 83.7, ELECTRA 85.2 to 86.1.
# Here: another 16 GB.  At tiny scale 6 layers x 128 read Python's documentation, and learn two tasks.  Their generator is nearly
#   always wrong, so there are no conflicts to speak of: it shows that the recipe runs, and tests nothing.
# Costs: tiny 4 runs of 400 steps and 16 fine-tunings; paper 4 runs of a million steps of 256 x 512 tokens, and 800 fine-tunings.
. "$(dirname "$0")/common.sh"
# see the other recipes of paper C
: "${variants:=bert bert-mcmisp electra electra-mcmisp}" "${table:=c-table3}" "${models:=c}" "${start:=--init}"
case $SCALE in
tiny)
  text=builtin:python-docs vocabulary=4000 length=64 tasks=${tasks:-mrpc rte} SEEDS=${SEEDS:-1} moments="100 200 300"
  learn() {
    run pretrain "$packed" --layers "${depth:-6}" --hidden 128 --heads 8 --learning-rate 1e-3 --steps "${STEPS:-400}" --warmup-steps 20 "$@"
  }
  tune() { keep search "$data" --grid learning-rate=3e-4,1e-3 --max-length 64 --epochs "${EPOCHS:-2}" --seeds "$SEEDS" "$@"; }
  ;;
paper)
  text=wikipedia-and-books vocabulary=32768 length=512 tasks="mnli qqp qnli sst-2 cola sts-b mrpc glue-rte" SEEDS=${SEEDS:-5}
  need $text "16 GB of text, such as Wikipedia (hf download wikimedia/wikipedia --repo-type dataset) and books, in one folder"
  moments="200000 400000 600000 800000"
  learn() {
    run pretrain "$packed" --size base --steps 1000000 --warmup-steps 10000 --batch-size 256 --learning-rate 1e-4 --beta2 0.98 \
      --epsilon 1e-6 --evaluate-every 10000 --save-every 5000 "$@"
  }
  tune() {
    case $task in mrpc | glue-rte | sts-b | cola) epochs=10 ;; *) epochs=5 ;; esac
    keep search "$data" --grid learning-rate=1e-5,2e-5,3e-5,4e-5,5e-5 --max-length 512 --epochs $epochs --beta2 0.98 \
      --epsilon 1e-6 --seeds "$SEEDS" "$@"
  }
  ;;
esac
# The plan of a variant.
command -v plan_of >/dev/null || plan_of() { echo "preset:$(echo "$1" | sed 's/^electra-//; s/^bert-mcmisp/mcmisp-bert/')"; }
need_tasks "$tasks"
ready

pack c "$(at "$text")" "$vocabulary" "$length" --sentences rules
pairs=$(run build-cooccur "$corpus" "$tokenizer" --name c-pairs)
for variant in $variants; do
  case $variant in bert*) set -- --architecture bert ;; *) set -- --objective electra ;; esac
  case $variant in *-*) set -- "$@" --plan "$(plan_of "$variant")" --cooccur "$pairs" ;; esac
  if [ "$start" = --along ]; then
    for moment in $moments; do set -- "$@" --snapshots "$moment"; done
  fi
  model=$(learn "$@" --name "$models-$variant")
  for task in $tasks; do
    task "$task"
    tune "$start" "$model" --name "$table-$task-$variant"
  done
done
# The report, with the cells of the paper.
command -v finish >/dev/null || finish() {
  report c-table3 --row '*-bert=BERT (Ours)' --row '*-bert-mcmisp=BERT-McMisP' --row '*-electra=ELECTRA (Ours)' \
    --row '*-electra-mcmisp=ELECTRA-McMisP' --column '*-mnli-*=MNLI' --column '*-qnli-*=QNLI' --column '*-qqp-*=QQP' \
    --column '*-sst-2-*=SST' --column '*-cola-*=CoLA' --column '*-mrpc-*=MRPC' --column '*-rte-*=RTE' --column '*-sts-b-*=STS'
}
finish
