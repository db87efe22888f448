#!/bin/sh
# Paper D, figure 4b: how strong should the adversary be?  Figure 4a, its speed, is in `python -m benchmarks.attack_cost`.
#
# The paper: BERT on DREAM and HellaSwag with τ of .3, .6 and 1; DREAM is best with 1, HellaSwag with .3.  No scores are printed.
# Here: the penalty has the weight τ², as in the published code.  At tiny scale as in d-table2.sh.
# Costs: tiny 6 fine-tunings beside the small model; paper 30.
table=d-figure4 tiny_tasks="paws-dev hellaswag-val" paper_tasks="dream hellaswag"
tiny_rows=bert:asa-weaker paper_rows=bert:asa-weaker
finish() { report d-figure4; }
# shellcheck source=d-table1.sh
. "$(dirname "$0")/d-table1.sh"
