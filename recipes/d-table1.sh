#!/bin/sh
# Paper D, table 1: fine-tuning under adversarial self-attention (ASA), and pre-training on under it.
#
# The paper: seven tasks, the mean of 3 seeds (GLUE, test server) or 5; ASA gains 1.2 points with BERT and 1.3 with RoBERTa.  After
#   20,000 steps more on Wikipedia, plain fine-tuning gains .1, and 1.1 if these steps were under ASA.
# Here: GLUE's development files are the test, and all tasks have five seeds.  At tiny scale 4 layers x 128 that read Python's
#   documentation, and two tasks.
# Costs: tiny 2 runs of 300 steps beside that of the small model, and 8 fine-tunings; paper 2 runs of 20,000 steps, and 210
#   fine-tunings.
. "$(dirname "$0")/common.sh"
: "${table:=d-table1}" # see the other recipes of paper D
case $SCALE in
tiny)
  SEEDS=${SEEDS:-1} tasks=${tiny_tasks:-sst wnut} rows=${tiny_rows:-bert:plain bert:asa continued:plain continued-asa:plain}
  rate=3e-4
  ;;
paper)
  SEEDS=${SEEDS:-5} tasks=${paper_tasks:-sst-2 mnli qnli qqp sts-b wnut dream}
  rows=${paper_rows:-bert:plain bert:asa continued:plain continued-asa:plain roberta:plain roberta:asa}
  for row in $rows; do
    case $row in
    roberta:*) need_model roberta-base ;;
    deberta:*) need_model microsoft/deberta-v3-large ;;
    continued*) need_model bert-base-uncased && need_wikipedia en ;;
    *) need_model bert-base-uncased ;;
    esac
  done
  rate=2e-5
  ;;
esac
need_tasks "$tasks"
ready

# The model of a row, $init.
start() {
  case $SCALE-$1 in
  tiny-continued*) small_model && more=300 ;;
  tiny-*) small_model && return ;;
  *-roberta) init=$(at roberta-base) && return ;;
  *-deberta) init=$(at microsoft/deberta-v3-large) && return ;;
  *-continued*)
    init=$(at bert-base-uncased) more=20000
    corpus=$(run build-corpus "$(at 20231101.en)" --name wikipedia)
    packed=$(run build-sequences "$corpus" "$init" --max-length 128)
    ;;
  *) init=$(at bert-base-uncased) && return ;;
  esac
  case $1 in *-asa) plan=preset:asa-pretraining ;; *) plan=none ;; esac
  init=$(run pretrain "$packed" --init "$init" --plan $plan --batch-size 128 --steps "${STEPS:-$more}" --name "d-$1")
}

for row in $rows; do
  start "${row%%:*}"
  for task in $tasks; do
    task "$task"
    length=128 batch=32 epochs=3 # as in the published code
    case $task in dream) length=512 batch=16 epochs=6 ;; hellaswag*) batch=16 ;; esac
    how=''
    case ${row#*:} in
    plain) ;;
    asa) how="--plan preset:asa" ;;
    freelb | smart) how="--adversarial ${row#*:}" ;;
    random-mask-scheduled)
      followed=$(run finetune "$data" --init "$init" --max-length $length --batch-size $batch --epochs "${EPOCHS:-$epochs}" \
        --learning-rate "$rate" --plan preset:asa)
      how="--plan preset:random-mask-scheduled --masking-run $followed"
      ;;
    random-mask) how="--plan preset:random-mask --grid plan.1.proportion=0.05,0.1" ;;
    random-mask-magnitude) how="--plan preset:random-mask-magnitude" ;;
    asa-weaker) how="--plan preset:asa --grid plan.1.tau=0.3,0.6,1.0 --test-every" ;;
    esac
    # shellcheck disable=SC2086  # flags are words
    keep search "$data" --init "$init" --max-length $length --batch-size $batch --epochs "${EPOCHS:-$epochs}" \
      --learning-rate "$rate" --seeds "$SEEDS" $how --name "$table-$task-$(echo "$row" | tr : -)"
  done
done
# The report, with the cells of the paper.
command -v finish >/dev/null || finish() {
  report d-table1 --row '*-bert-plain=BERT' --row '*-bert-asa=BERT^ASA' --row '*-continued-plain=BERT†' \
    --row '*-continued-asa-plain=BERT^ASA†' --row '*-roberta-plain=RoBERTa' --row '*-roberta-asa=RoBERTa^ASA' \
    --column '*-sst-*=SST-2' --column '*-mnli-*=MNLI' --column '*-qnli-*=QNLI' --column '*-qqp-*=QQP' --column '*-sts-b-*=STS-B' \
    --column '*-wnut-*=WNUT-17' --column '*-dream-*=DREAM'
}
finish
