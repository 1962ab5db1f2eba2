"""Rewards: functions and models that score a finished trajectory, and the processes they run in.

    scorer = await Scorer.create(cfg.reward)           # treadle.reward.scorer
    score = await scorer.score(task, trajectory)       # a Score, or RewardFailure

A function is a built-in (`treadle.reward.builtin`) or `package.module:function`, sync or async. It takes any of
`task`, `trajectory`, `response`, `ground_truth`, `messages`, `data_source` and `extra` by name, plus its configured
kwargs; verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` fits as it is. It returns a number,
a Score, or a map with "score" and whatever else it wants to report. A worker runs one score at a time; a function that
only waits for a server, such as a judge behind an API, is better off with `num_workers: 0`, where scores overlap.

With `python` a function is imported and called in another interpreter, a child of its worker, under the same limits.

Reward models are parts of the sum too: `treadle.reward.classifier` holds discriminative ones, `treadle.reward.judge`
generative ones, `treadle.reward.reward_models` what they have in common. What follows is about functions.

What a worker process protects the run from
- Time: a score that passes `timeout_s` is killed with SIGKILL, with every process it started, in C code too.
- CPU: a score that uses more than `cpu_time_s`, with the processes it started, is killed.
- Memory: private writable memory of the worker is bounded by `memory_mb`, and so is what its whole tree holds, shared
  memory included.
- Crashes: exit, abort, segmentation fault or a full memory end one attempt of one score; the next gets a new process.
- Leftovers: what a score starts ends with it. A helper that should live on is started when the module is imported.
- The records: arguments are copies. Results come back as JSON of bounded size; the parent never unpickles them.
- Noise: standard input is empty; output and core dumps are dropped.
- The parent's death, by SIGKILL too: the kernel kills the worker's process group.
- Secrets: a worker's environment is an allow-list, and what `env` of its functions names.
- Order: replies are numbered; an unrequested one ends the worker.
- Code of a model: functions with `sandbox: true`, and `math` and `reasoning_gym`, may neither write, connect nor reach
  other processes (`treadle.reward.sandbox`). `code_tests` alone runs an answer as code, in boxes and not in a worker.

What it does not protect from (SECURITY.md has the whole list)
- Python that you import yourself, without `sandbox`. It runs as you, and reports any score it likes. So does code that
  a function runs by `exec`, for its own answer, in a sandbox too: `treadle.reward.sandbox.run_python` is for that.
- Disk use, GPU memory and the number of processes a score starts.
- A process that moved to a session of its own, when the worker or the parent then dies by itself.
- Anything at all where `num_workers` is 0, except that async functions still have their deadline.

The kernel's part needs Linux; elsewhere memory, leftovers and the parent's death are guarded as far as POSIX goes.
Invariant: a Score is what the functions said. A timeout, a crash or a missing number is a RewardFailure.
"""
