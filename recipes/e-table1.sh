#!/bin/sh
# Paper E, tables 1 and 4: models of 6 layers whose heads have patterns, on summaries and on topic segmentation.
#
# The paper: CNN/DM, NYT-50, WikiSection and Wiki-727K; 8 heads, 12 heads, and 12 heads with BERT's embeddings; 4 to 12 heads of a
#   layer have patterns.  Summaries gain up to .9 ROUGE-1, WikiSection 5.6 points of F1.  Table 4 is the same with trigram blocking, which
#   the report has as rouge1_blocked.  Means of the three best checkpoints of three seeds.
# Here: at tiny scale 4 layers x 128 with 8 heads, ScisummNet and Wiki-300.
# Costs: tiny 6 trainings; paper 132.
. "$(dirname "$0")/common.sh"
: "${table:=e-table1}" # see the other recipes of paper E
case $SCALE in
tiny)
  SEEDS=${SEEDS:-1} tasks=${tiny_tasks:-scisummnet wiki300} sizes=${tiny_sizes:-4x128x8}
  summaries() { keep search "$data" --max-length 512 --batch-size 4 --epochs "${EPOCHS:-4}" --learning-rate 3e-4 "$@"; }
  segments() {
    keep search "$data" --max-length 130 --batch-size 32 --epochs "${EPOCHS:-1}" --learning-rate 3e-4 --negatives 0.2 --bucket "$@"
  }
  ;;
paper)
  SEEDS=${SEEDS:-3} tasks=${paper_tasks:-cnn-dm nyt-50 wikisection wiki-727k} sizes=${paper_sizes:-6x512x8 6x768x12 bert}
  case " $sizes " in *" bert "*) need_model bert-base-uncased ;; esac
  summaries() {
    case $task in nyt-50) length=800 ;; *) length=512 ;; esac
    keep search "$data" --max-length $length --batch-size 36 --steps 50000 --evaluate-every 1000 --keep-best 3 \
      --schedule inverse-sqrt --learning-rate 2e-5 --warmup-steps 10000 --weight-decay 0 --epsilon 1e-9 "$@"
  }
  segments() {
    case $task in wikisection) epochs=5 ;; *) epochs=1 ;; esac
    keep search "$data" --max-length 258 --batch-size 64 --epochs $epochs --evaluate-every 2500 --keep-best 3 --select f1 \
      --learning-rate 1e-5 --warmup-fraction 0.1 "$@"
  }
  ;;
esac
need_tasks "$tasks"
ready

# The plans for a number of heads.
command -v plans_of >/dev/null || plans_of() {
  case $1 in
  *x8) echo none preset:patterns patterns-8 ;;
  *) echo none preset:patterns patterns-8 patterns-12 ;;
  esac
}
for size in $sizes; do
  case $size in
  bert) set -- --architecture bert --layers 6 --hidden 768 --heads 12 --embeddings-from "$(at bert-base-uncased)" ;;
  *) set -- --architecture bert --layers "${size%%x*}" --hidden "$(echo "$size" | cut -dx -f2)" --heads "${size##*x}" ;;
  esac
  for task in $tasks; do
    task "$task"
    case $task in wiki*) learn=segments ;; *) learn=summaries ;; esac
    for plan in $(plans_of "$size"); do
      case $plan in
      none | preset:*) $learn "$@" --plan "$plan" --seeds "$SEEDS" --name "$table-$task-$size-${plan#preset:}" ;;
      *)
        files="--plan $recipes/plans/$(echo "$plan" | sed "s|+|.toml --plan $recipes/plans/|g").toml"
        # shellcheck disable=SC2086  # flags are words
        $learn "$@" $files --seeds "$SEEDS" --name "$table-$task-$size-$(echo "$plan" | tr + -)"
        ;;
      esac
    done
  done
done
# The report, with the cells of the paper.
command -v finish >/dev/null || finish() {
  set --
  for size in 'x8=6 Layer 8 Heads' 'x12=6 Layer 12 Heads' '-bert=6 Layer 12 Heads (with BERT Embeddings)'; do
    ours="*${size%%=*}" theirs=${size#*=}
    case $size in x8=*) heads=8 ;; *) heads=12 ;; esac
    set -- "$@" --row "$ours-none=$theirs | Transformer" --row "$ours-patterns=$theirs | +Patterns (4/$heads)" \
      --row "$ours-patterns-$heads=$theirs | +Patterns ($heads/$heads)"
    [ $heads = 8 ] || set -- "$@" --row "$ours-patterns-8=$theirs | +Patterns (8/12)"
  done
  report e-table1 "$@" --column '*-cnn-dm-*=CNN/DM' --column '*-scisummnet-*=CNN/DM' --column '*-nyt-50-*=NYT-50' \
    --column '*-wikisection-*=WikiSection' --column '*-wiki300-*=WikiSection' --column '*-wiki-727k-*=Wiki-727K'
}
finish
