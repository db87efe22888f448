#!/bin/sh
# Paper A, table 6: attention guidance (AG) of an ELECTRA whose words are replaced by their frequency.
#
# The paper: a discriminator of 12 layers, two epochs of the BooksCorpus; its loss falls from .27 to .10 with AG.
# Here: the BooksCorpus is not public, so give another folder of books.  At tiny scale 8 layers x 128 and Python's documentation;
#   the discriminator's loss has the weight 1, since no other loss stands beside it.
# Costs: tiny 2 runs of 1,000 steps; paper 2 runs of two epochs.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1}
case $SCALE in
tiny)
  pack_text() { pack python-docs builtin:python-docs 4000 64; }
  set -- --layers 8 --hidden 128 --heads 4 --learning-rate 1e-3 --schedule constant --steps "${STEPS:-1000}" --evaluate-every 200
  ;;
paper)
  need books "a folder of books as text files"
  pack_text() { pack books "$(at books)" 52000 512; }
  set -- --layers 12 --hidden 768 --heads 12 --learning-rate 1e-4 --weight-decay 0 --batch-size 256 --epochs 2 \
    --evaluate-every 10000
  ;;
esac
ready

pack_text
for seed in $(seq 0 $((SEEDS - 1))); do
  for plan in none preset:ag; do
    keep pretrain "$packed" --objective electra --generator unigram --discriminator-weight 1 "$@" --plan $plan --seed "$seed" \
      --name "a6-${plan#preset:}-$seed"
  done
done
report a-table6 --row 'a6-none-*=ELECTRA' --row 'a6-ag-*=ELECTRA-AG'
