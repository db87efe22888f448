"""Which guides help a small ModernBERT, and which of them still do at the end?  The trial behind the advice of the README, as
one resumable command.

    python -m benchmarks.trial [--only PHASE] [--store artifacts] [--out docs/results]

A ModernBERT-shaped model of 8 layers x 128 with 4 heads learns masked words of 26 novels, in sequences of 64 tokens.  The
phases follow each other, and later ones use what earlier ones chose.  About the head start (`head_start`):

    search    plain runs over rates and second-moment decays, and as many guided ones over weights; seed 100
    arms      every arm at the best settings, 600 steps; seed 0
    long      none, the best loss, the best fixed guide, both towards a wrong place (shams), and the plan of paper A,
              1,200 steps
    longest   none and the winner, 3,000 steps
    roberta   none, the plan of paper A and the winner on a RoBERTa-shaped model, 600 steps
    oromo     none and the winner on news in Oromo, 600 steps

About what lasts (`lasting`):

    plain     plain runs over rates and falling rates, then warm-up, then weight decay, 1,200 steps; seed 100
    where     the neighbours mixed into each of six places in all layers, then into the best place in some, at the best
              plain settings, 1,200 steps; seed 0
    wide      the same in the best place, with one to three tokens on each side, with and without the token itself, and
              that alone, which is a sham; seed 0
    together  the best two places; the best one beside fixed heads, and beside gates that read the query; these alone;
              seed 0
    final     none, fixed heads, the winner of the three phases before, and its sham, 3,000 steps; afterwards the best place
              alone, where the winner has something beside it
    own       fixed heads and the winner over as many settings as the plain runs had, 1,200 steps; seed 100
    own-of-winner
              none and fixed heads with the settings that were best for the winner, 1,200 steps; seed 100
    final-own the winner with the settings that were best for it, 3,000 steps; then the best place alone with them
    muon      plain runs with the optimizer Muon over rates, then fixed heads and the winner at the best of them, 1,200 steps;
              seed 100
    final-roberta, final-oromo, final-hausa
              none, fixed heads and the winner on a RoBERTa-shaped model, in Oromo, and in Hausa, 1,200 steps
    patterns  the neighbours in the best place, and beside them patterns that places do not give, each with its sham, 3,000
              steps; one seed
    use       the models of ``final`` on SST, TREC and BLiMP
    use-hausa
              the models of ``final-hausa`` on named entities in Hausa
    use-patterns
              the models of ``patterns`` on SST, and on BLiMP where no parser is needed
    larger    none, fixed heads and the winner with 12 layers x 256, 1,500 steps; one seed
    longer    none and the winner, 8,000 steps; one seed

About a Llama-shaped model of the same size that predicts the next token, in sequences of 256 tokens (`decoders`):

    causal-plain
              plain runs over the settings of ``plain``, 1,200 steps; seed 100
    causal-final
              none, the previous token mixed into the stream of all layers, and its sham; then fixed heads on the previous token,
              losses towards the previous token and induction, and the sham of these; 3,000 steps
    causal-use
              BLiMP, and the induction scores of heads every 300 steps

The seeds of ``long``, ``roberta`` and ``oromo`` are 1, 2 and 3, those of the phases from ``final`` on are 4, 5 and 6; nothing
was chosen on them.  What is best has the lowest last validation loss.  Three comparisons were named before they were made:
the winner against none, fixed heads and its sham, at the last validation of ``final``, paired by seed, corrected by Holm's
method.  In ``causal-final`` they are the mix against none, fixed heads and its sham; in ``use`` the winner and fixed heads against
none, corrected over the rows of a task.  All else is descriptive.

Runs whose figures are in the JSON are not repeated, and interrupted ones are continued; several processes may share the work.
At the end the steps of ``long`` are timed, each plan in turn.

A sham has its guides pointed seven tokens away, or its keys shuffled.  Patterns of roles (rare words, syntax) are made from the whole text and tell
something about masked words, so a bias that uses them fades out: at the last validation nothing is told.  ``convolution`` is a
control without guides: a learned sum of each token with its two neighbours before each of the two lowest layers.
"""
