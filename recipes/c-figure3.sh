#!/bin/sh
# Paper C, figure 3: how early in pre-training does McMisP have the score of the plain model?
#
# The paper: the average of GLUE that ELECTRA reaches at the end after 60 % of the steps, that of BERT after 40 %.
# Here: as in c-table3.sh, with the weights of four moments of each run.
# Costs: tiny 4 runs of 400 steps and 64 fine-tunings; paper 4 runs of a million steps, and 4,000 fine-tunings.
table=c-figure3 start=--along
finish() { report c-figure3; }
# shellcheck source=c-table3.sh
. "$(dirname "$0")/c-table3.sh"
