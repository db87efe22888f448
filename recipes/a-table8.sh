#!/bin/sh
# Paper A, table 8: how well does the best head find what a mention refers to?
#
# The paper: RoBERTa of 12 layers with and without attention guidance (AG) of half or all heads, and with random weights; CoNLL-2012
#   and sentences with reflexives.  Heads of the plain model are best (.68), half guided ones fall to .28 and guided ones to .21.
# Here: LitBank in place of CoNLL-2012, which is not public.  Only the first 128 tokens of a text count, as in the paper, and LitBank
#   has few texts, so there are some fifty mentions.  At tiny scale 4 layers x 128 that read LitBank's novels.
# Costs: tiny 3 runs of 600 steps; paper 3 runs, of 4 days on 8 GPUs each.
. "$(dirname "$0")/common.sh"
need coref-litbank/conll "git clone https://github.com/dbamman/litbank '$DATA/litbank' && ln -s litbank/coref '$DATA/coref-litbank'"
case $SCALE in
tiny)
  text=lm-litbank-books/books vocabulary=8000 length=64 sentences=2000
  need $text "mkdir -p '$DATA/lm-litbank-books' && ln -s ../litbank/original '$DATA/$text' # of the same clone"
  set -- --layers 4 --hidden 128 --heads 4 --learning-rate 1e-3 --schedule constant --steps "${STEPS:-600}"
  ;;
paper)
  text=20231101.en vocabulary=52000 length=512 sentences=10000
  need_wikipedia en
  set -- --layers 12 --hidden 768 --heads 12 --learning-rate 1e-4 --weight-decay 0 --batch-size 256 --epochs 10
  ;;
esac
ready

pack a8 "$(at "$text")" "$vocabulary" "$length"
for plan in none preset:ag "$recipes/plans/a-table8-all-heads.toml"; do
  name=a8-$(basename "${plan#preset:}" .toml)
  keep pretrain "$packed" --architecture roberta --attention-dropout 0 "$@" --plan "$plan" --name "$name"
  model=$made
  keep probe coref "$model" "$(at coref-litbank/conll)" --name "$name-coref"
  keep probe reflexive "$model" --sentences "$sentences" --name "$name-reflexive"
done
keep probe coref "$model" "$(at coref-litbank/conll)" --random 0 --name a8-random-coref
keep probe reflexive "$model" --sentences "$sentences" --random 0 --name a8-random-reflexive
report a-table8 --row 'a8-none*=RoBERTa-MLM' --row 'a8-ag*=RoBERTa-AG (λ = 1/2)' --row 'a8-*-all-heads*=RoBERTa-AG (λ = 1)' \
  --row 'a8-random-*=Randomly Initialized' --column '*-coref=CoNLL-2012' --column '*-reflexive=Synthetic' \
  --column '*=English Wikipedia'
