#!/bin/sh
# What the heads of a published model do: all probes of heads on English data, each beside random weights of the same shape.
#
# Beside table 8 of paper A, which is of BERT and other data; LitBank stands for CoNLL-2012, and mentions choose between the mentions before
#   them: the paper does not say between what, and its random model could not be right half of the time among all words.
# MODEL is the folder of an encoder, by default of all-MiniLM-L6-v2 as the extra `models` of guide installs it.
# Costs: tiny 15 minutes of one core, for this model of 22.7 million parameters; at paper scale all of the data is read.
. "$(dirname "$0")/common.sh"
case $SCALE in
tiny) sequences=200 sentences=1000 examples=150 pairs=25 ;;
paper) sequences=0 sentences=0 examples=0 pairs=200 ;;
esac
said="The keys to the cabinet that the old man had lost are on the table, and he could not find them"
need_published
need coref-gap/gap-validation.tsv https://raw.githubusercontent.com/google-research-datasets/gap-coreference/HEAD/gap-validation.tsv
for stereotype in pro anti; do
  need coref-winobias/${stereotype}_stereotyped_type1.txt.dev \
    https://raw.githubusercontent.com/uclanlp/corefBias/HEAD/WinoBias/wino/data/${stereotype}_stereotyped_type1.txt.dev
done
need coref-gum/ontogum "git clone https://github.com/amir-zeldes/gum '$DATA/gum' && mkdir -p '$DATA/coref-gum' && ln -s ../gum/coref/ontogum/conll '$DATA/coref-gum/ontogum'"
need coref-litbank/conll "git clone https://github.com/dbamman/litbank '$DATA/litbank' && ln -s litbank/coref '$DATA/coref-litbank'"
need ud-english-ewt/en_ewt-ud-dev.conllu https://raw.githubusercontent.com/UniversalDependencies/UD_English-EWT/HEAD/en_ewt-ud-dev.conllu
novel=lm-litbank-books/books/1023_bleak_house.txt
need $novel https://raw.githubusercontent.com/dbamman/litbank/HEAD/original/1023_bleak_house.txt
need_tasks sst
ready

for weights in trained random; do
  case $weights in trained) set -- ;; random) set -- --random 0 ;; esac
  keep probe coref "$MODEL" "$(at coref-gap/gap-validation.tsv)" "$@" --name "heads-gap-$weights"
  keep probe coref "$MODEL" "$(at coref-winobias/pro_stereotyped_type1.txt.dev)" \
    "$(at coref-winobias/anti_stereotyped_type1.txt.dev)" "$@" --name "heads-winobias-$weights"
  keep probe coref "$MODEL" "$(at coref-gum/ontogum)" --scope windows "$@" --name "heads-gum-$weights"
  keep probe coref "$MODEL" "$(at coref-litbank/conll)" --scope windows "$@" --name "heads-litbank-$weights"
  keep probe coref "$MODEL" "$(at coref-litbank/conll)" --scope windows --candidates preceding_mentions "$@" \
    --name "heads-mentions-$weights"
  keep probe reflexive "$MODEL" "$@" --name "heads-reflexive-$weights"
  keep probe deps "$MODEL" "$(at ud-english-ewt/en_ewt-ud-dev.conllu)" --limit "$sentences" "$@" --name "heads-deps-$weights"
  keep probe relevance "$MODEL" "$(at $novel)" --limit "$sequences" "$@" --name "heads-patterns-$weights"
  keep probe sinks "$MODEL" "$(at $novel)" --limit "$sequences" "$@" --name "heads-sinks-$weights"
  keep probe distance "$MODEL" "$(at $novel)" --limit "$pairs" --sequence-length 128 "$@" --name "heads-distance-$weights"
done

# what heads are worth for a task, and how far they move when the model learns it
task sst
for weights in trained random; do
  case $weights in trained) set -- ;; random) set -- --random-init ;; esac
  tuned=$(run finetune "$data" --init "$MODEL" "$@" --steps "${STEPS:-100}" --learning-rate 1e-4 --max-length 64 --bucket \
    --name "heads-sst-$weights")
  keep evaluate "$tuned" "$data" --name "heads-sst-$weights-test"
  keep probe importance "$tuned" "$data" --limit "$examples" --name "heads-importance-$weights"
  keep probe importance "$tuned" "$data" --by off --limit "$examples" --name "heads-off-$weights"
  [ $weights = random ] || keep probe distance "$MODEL" "$(at $novel)" --from "$tuned" --limit "$pairs" --sequence-length 128 --name heads-moved
done
# two heads of the same model under guidance
keep finetune "$data" --init "$MODEL" --plan "$recipes/plans/two-heads.toml" --steps "${STEPS:-40}" --batch-size 16 \
  --learning-rate 3e-4 --max-length 64 --bucket --name heads-guided
report a-table8 --row 'heads-*-trained=BERTBASE (Devlin et al., 2018a)' --row 'heads-*-random=Randomly Initialized' \
  --column 'heads-mentions-*=CoNLL-2012' --column 'heads-reflexive-*=Synthetic' --text "$said"
