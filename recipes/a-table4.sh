#!/bin/sh
# Paper A, table 4: what are models with attention guidance (AG) worth on tasks, beside models without (MLM)?
#
# The paper: the models of table 3 on MNLI, QNLI, QQP, Filipino sentiment and named entities in Oromo (10 folds).  AG is ahead in
#   11 of 12 English cells, and by up to 16 points in Oromo.
# Here: GLUE's development files are the test; the Oromo entities are not public.  At tiny scale 4 layers x 128 read Python's
#   documentation or news in Swahili, and learn sentiment or entities.
# Costs: tiny 4 runs of 600 steps and 8 fine-tunings; paper the runs of a-table3.sh and 312 fine-tunings.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1} swahili=lm-masakhane-text/swahili_voa.txt
case $SCALE in
tiny)
  languages="builtin:python-docs $swahili" depths=4 heads=4 vocabulary=4000 length=64
  need $swahili https://raw.githubusercontent.com/masakhane-io/masakhane-ner/HEAD/text_by_language/swahili/voa_clean_final.txt
  learn() { run pretrain "$packed" --hidden 128 --learning-rate 1e-3 --schedule constant --steps "${STEPS:-600}" "$@"; }
  tune() { keep search "$data" --grid learning-rate=3e-4,1e-3 --max-length 64 --epochs "${EPOCHS:-2}" "$@"; }
  ;;
paper)
  languages="20231101.en 20231101.tl 20231101.om" depths="8 12 16" heads=12 vocabulary=52000 length=512
  for text in $languages; do
    need_wikipedia "${text#*.}"
  done
  learn() {
    run pretrain "$packed" --hidden 768 --learning-rate 1e-4 --weight-decay 0 --batch-size 256 --evaluate-every 10000 "$@"
  }
  tune() { keep search "$data" --grid learning-rate=1e-5,2e-5,3e-5,5e-5 --max-length 128 --epochs 3 "$@"; }
  ;;
esac
tasks_of() {
  case $1 in
  builtin*) echo sst ;;
  *.en) echo mnli qnli qqp ;;
  *.tl) echo filipino ;;
  *.om) echo ner-oromo ;;
  *) echo ner-swahili ;;
  esac
}
for text in $languages; do need_tasks "$(tasks_of "$text")"; done
ready

for text in $languages; do
  name=$(basename "${text#*:}" .txt)
  pack "$name" "$(at "$text")" "$vocabulary" "$length"
  case $text in *.en) set -- --epochs 10 ;; 2023*) set -- --epochs 40 ;; esac
  for layers in $depths; do
    for plan in none preset:ag; do
      label=$name-$layers-${plan#preset:}
      model=$(learn --architecture roberta --attention-dropout 0 --layers "$layers" "$@" --plan $plan --name "a3-$label-0" \
        --heads "$([ "$layers" = 16 ] && echo 16 || echo "$heads")")
      for task in $(tasks_of "$text"); do
        task "$task"
        case $task in ner-oromo) folds=10 ;; *) folds=0 ;; esac
        tune --init "$model" --seeds "$SEEDS" --folds "$folds" --name "a4-$task-$label"
      done
    done
  done
done
set --
for layers in 8 12 16; do
  set -- "$@" --row "*-$layers-none=RoBERTa-$layers-MLM" --row "*-$layers-ag=RoBERTa-$layers-AG"
done
report a-table4 "$@" --column 'a4-qnli-*=English QNLI' --column 'a4-qqp-*=English QQP' \
  --column 'a4-filipino-*=Filipino Sentiment' --column 'a4-ner-oromo-*=Oromo NER'
