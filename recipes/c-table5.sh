#!/bin/sh
# Paper C, table 5: is it the conflicts?  Scores of the original word (Ground), or one score for all words (Constant), instead.
#
# The paper: of what McMisP gains in c-table3.sh (BERT .7, ELECTRA .9 points) Ground keeps .1 and .3, Constant .1 and .2.
# Here: as in c-table3.sh, from which it takes the models that are there.
# Costs: tiny 8 runs of 400 steps and 32 fine-tunings; paper 8 runs of a million steps, and 1,600 fine-tunings.
table=c-table5
variants="bert bert-mcmisp bert-mcmisp-constant bert-mcmisp-ground
  electra electra-mcmisp electra-mcmisp-constant electra-mcmisp-ground"
finish() { report c-table5; } # the paper prints averages
# shellcheck source=c-table3.sh
. "$(dirname "$0")/c-table3.sh"
