#!/bin/sh
# Paper D, table 2: are models that were fine-tuned under ASA more robust?
#
# The paper: ANLI, PAWS-QQP and HellaSwag; ASA gains 2.4, 6.0 and 1.1 points with BERT and .6, .3 and 1.1 with DeBERTa.
# Here: at tiny scale parts of the development files of PAWS-QQP and HellaSwag, with the small model of d-table1.sh.
# Costs: tiny 4 fine-tunings beside the small model; paper 60.
table=d-table2 tiny_tasks="paws-dev hellaswag-val" paper_tasks="anli paws-qqp hellaswag"
tiny_rows="bert:plain bert:asa" paper_rows="bert:plain bert:asa deberta:plain deberta:asa"
finish() {
  report d-table2 --row '*-bert-plain=BERT-base' --row '*-bert-asa=BERT^ASA' --row '*-deberta-plain=DeBERTa-large' \
    --row '*-deberta-asa=DeBERTa^ASA' --column '*-anli-*=ANLI' --column '*-paws-*=PAWS-QQP' --column '*-hellaswag-*=HellaSWAG'
}
# shellcheck source=d-table1.sh
. "$(dirname "$0")/d-table1.sh"
