"""Two checkouts side by side: what shows that a rebuild changed nothing but the shape.

    python -m tests.rebuild.compare OLD NEW [--only GLOB ...] [--fast] [--keep DIR] [--jobs 1] [--steps 10]

OLD and NEW are each the path of a checkout or a git revision of this repository. Both train every layout of
`layouts` by their public command, and are compared bit for bit: each step's loss and gradient norm, validations, the
sample, every tensor of the last checkpoint, and what each predicts of memory and traffic, here and for the big layouts
of `layouts.grid`. Of some layouts NEW also goes on from OLD's checkpoint of the middle, to the end that OLD came to by
itself. One line a layout: equal, or what differs first. Exit code 0: nothing differs; 1: something does; 2: bad
arguments.

Which layouts: all of them take a quarter of an hour on two cores, so choose. `--list` prints each with its words,
whether it is of the fast ones and whether NEW goes on from OLD's checkpoint. While working, take those that run the
code that changed, by parts of their names: `--only '*pp-*'` for stages, `'*loco*' '*int*'` for codecs, `'*cp*'
'packed-*' 'chats-*'` for context parallelism and data, `'hf-*'` for transformers and LoRA. `--fast` keeps one or two of
each kind of run; `--only grid` asks for predictions alone, in half a minute. Before a rebuild is called done, run all,
with `--keep`: then the results of a side given as a revision are kept, by commit and layout, so that OLD runs once; a
checkout's are made anew each time. `--new-word KEY=VALUE` gives NEW another word, to see that a difference is found. A
new layout is a line of `layouts.LAYOUTS`, as small as the others, and needs nothing else.

Run it from the root of the repository, in an environment with what the package needs; `hf-*` needs transformers and
peft, `chats-*` tokenizers.

What it takes as given of a checkout: `python -m meshwright run PRESET WORDS --out PATH [--resume CHECKPOINT]`, names of
the configuration's keys, `metrics.jsonl`, `checkpoints/<step>` of safetensors files with their `layout.json`. How
predictions are asked for stands in `predict`, alone: when that way moves, adapt that file. Where a rebuild changes one
of these on purpose, say so there, not by a layout left out. A revision whose metrics say `loss`, without a unit, can be
compared with others like it only.

None of these files imports `meshwright`: which one is compared is decided by what is given.
"""
