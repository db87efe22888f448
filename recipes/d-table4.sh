#!/bin/sh
# Paper D, table 4: adversarial self-attention beside FreeLB and SMART, which perturb word embeddings.
#
# The paper: BERT; ASA is ahead on PAWS-QQP and HellaSwag (87.7, 40.8; FreeLB 86.3, 39.6; SMART 85.8, 38.2), SMART on MNLI and QNLI
#   (85.5, 91.6; ASA 85.0, 91.4; FreeLB 85.3, 91.1).
# Here: the sizes of the perturbations are those of the published code of FreeLB and SMART.  At tiny scale as in d-table2.sh.
# Costs: tiny 6 fine-tunings beside the small model; paper 60.
table=d-table4 tiny_tasks="rte paws-dev" paper_tasks="mnli qnli paws-qqp hellaswag"
tiny_rows="bert:freelb bert:smart bert:asa" paper_rows="bert:freelb bert:smart bert:asa"
finish() {
  report d-table4 --row '*-freelb=FreeLB' --row '*-smart=SMART' --row '*-asa=ASA' --column '*-mnli-*=MNLI' --column '*-qnli-*=QNLI' \
    --column '*-paws-*=PAWS-QQP' --column '*-hellaswag-*=HellaSWAG'
}
# shellcheck source=d-table1.sh
. "$(dirname "$0")/d-table1.sh"
