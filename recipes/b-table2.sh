#!/bin/sh
# Paper B, table 2: translation with role-guided masks in the encoder.
#
# The paper: BLEU 38.8 on WMT16 English-German, beside 34.3 of a plain transformer.  Its code measures predictions that see the true
#   words before them, on captions like those of Multi30k, so its figure does not compare with translations.
# Here: translations by beam search, Multi30k.  Masks stay on.  Without PARSER only the three roles that need no parser.
# Costs: tiny 2 runs of 600 steps, and the translation of 1,000 sentences by each; paper 2 runs of 30 epochs.
. "$(dirname "$0")/common.sh"
SEEDS=${SEEDS:-1} roles=preset:roles-unparsed
for split in train val test_2016_flickr; do
  for side in en de; do
    need "mt-multi30k/$split.$side" "https://raw.githubusercontent.com/multi30k/dataset/HEAD/data/task1/raw/$split.$side.gz"
  done
done
case $SCALE in
tiny) set -- --batch-tokens 2048 --learning-rate 1e-3 --warmup-steps 200 --steps "${STEPS:-600}" --evaluate-every 200 ;;
paper)
  PARSER=${PARSER:-spacy:en_core_web_sm} # python -m spacy download en_core_web_sm
  set -- --batch-size 64 --learning-rate 1e-3 --warmup-steps 4000 --epochs 30 --evaluate-every 500
  ;;
esac
ready

file() { at "mt-multi30k/$1"; }
pairs=$(run build-dataset --train "$(file train.en)" --train-pair "$(file train.de)" --name multi30k-en-de \
  --valid "$(file val.en)" --valid-pair "$(file val.de)" \
  --test "$(file test_2016_flickr.en)" --test-pair "$(file test_2016_flickr.de)")
joint=$(run build-tokenizer "$pairs" --vocab-size 8000)
packed=$(run build-sequences "$pairs" "$joint" --max-length 70 --packing pairs)
idf=$(run build-idf "$pairs" --column text --unit sentence)
if [ -z "${PARSER:-}" ]; then
  masks=$(run build-masks "$packed" --idf "$idf")
else
  roles=preset:roles
  trees=$(run build-deps "$pairs" --column text --parser "$PARSER")
  masks=$(run build-masks "$packed" --idf "$idf" --deps "$trees")
fi
for seed in $(seq 0 $((SEEDS - 1))); do
  set -- --objective translation --layers 2 --hidden 256 --heads 8 --ffn 512 --schedule inverse-sqrt --beta2 0.98 "$@" \
    --seed "$seed"
  keep pretrain "$packed" "$@" --name "b2-plain-$seed"
  keep evaluate "$made" "$packed" --name "b2-plain-$seed-test"
  keep pretrain "$packed" "$@" --plan $roles --masks "$masks" --name "b2-roles-$seed"
  keep evaluate "$made" "$packed" --masks "$masks" --name "b2-roles-$seed-test"
done
report b-table2 --row 'b2-plain-*=Transformer [19]' --row 'b2-roles-*=Transformer-Guided-Attn (ours)'
