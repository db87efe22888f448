#!/bin/sh
# Paper E, tables 2 and 5: which of the patterns help summaries?  All subsets of match, intra and pos.
#
# The paper: 6 layers with 8 heads on CNN/DM; all three gain .92 ROUGE-1, match and intra .84, pos alone loses .16.  Table 5 is the
#   same with trigram blocking, which the report has as rouge1_blocked.
# Here: at tiny scale as in e-table1.sh, on ScisummNet.
# Costs: tiny 8 trainings; paper 24.
: "${table:=e-table2}" "${tiny_tasks:=scisummnet}" "${paper_tasks:=cnn-dm}" # see e-table7.sh
paper_sizes=6x512x8
plans_of() { echo none match intra pos match+intra match+pos intra+pos preset:patterns; }
finish() {
  report "$table" --row '*-none=Transformer' --row '*-match-intra=+ m + i' --row '*-match-pos=+ m + p' --row '*-intra-pos=+ i + p' \
    --row '*-match=+ match (m)' --row '*-intra=+ intra (i)' --row '*-pos=+ pos (p)' --row '*-patterns=+ all'
}
# shellcheck source=e-table1.sh
. "$(dirname "$0")/e-table1.sh"
