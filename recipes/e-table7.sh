#!/bin/sh
# Paper E, table 7: which of the patterns help topic segmentation?  All subsets of match, intra and pos.
#
# The paper: 6 layers with 8 heads on WikiSection; F1 gains .056 with all, .051 with match alone.
# Here: at tiny scale as in e-table1.sh, on Wiki-300.
# Costs: tiny 8 trainings; paper 24.
table=e-table7 tiny_tasks=wiki300 paper_tasks=wikisection
# shellcheck source=e-table2.sh
. "$(dirname "$0")/e-table2.sh"
