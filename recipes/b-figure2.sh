#!/bin/sh
# Paper B, figure 2: what is each of the five roles worth?  Accuracy without each of them.
#
# The paper: on the data sets of table 3 accuracy falls without any of the roles, most without major relations.  It prints no
#   figures.
# Here: a role that is left out leaves an ordinary head.  At tiny scale TREC alone, and without PARSER only the roles that need no
#   parser.
# Costs: tiny 4 trainings of at most 12 epochs; paper 252 of at most 30.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1} plan=preset:roles
case $SCALE in
tiny)
  tasks=trec folds=3
  set -- --layers 2 --hidden 96 --dropout 0.3 --batch-size 64 --epochs "${EPOCHS:-12}" --patience 3
  [ -n "${PARSER:-}" ] || plan=preset:roles-unparsed
  ;;
paper)
  PARSER=${PARSER:-spacy:en_core_web_sm} # python -m spacy download en_core_web_sm
  tasks="cr trec subj mpqa mr sst-phrases" folds=10
  need glove.6B.100d.txt "unzip https://nlp.stanford.edu/data/glove.6B.zip into $DATA"
  set -- --layers 4 --vectors "$(at glove.6B.100d.txt)" --dropout 0.3 --batch-size 64 --epochs 30 --patience 5
  ;;
esac
need_tasks "$tasks"
ready

[ $plan = preset:roles-unparsed ] || set -- "$@" --parser "$PARSER"
for task in $tasks; do
  task "$task"
  case $task in trec | sst*) folds_of=0 ;; *) folds_of=$folds ;; esac
  keep search "$data" --architecture role-transformer --heads 6 --ffn 256 --learning-rate 1e-3 "$@" --plan $plan --leave-one-out \
    --folds "$folds_of" --seeds "$SEEDS" --name "bf2-$task"
done
report b-figure2
