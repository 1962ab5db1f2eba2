"""Rewards: functions and models that score a finished trajectory, and the processes they run in.

    scorer = await Scorer.create(cfg.reward)           # treadle.reward.scorer
    score = await scorer.score(task, trajectory)       # a Score, or RewardFailure

A function is a built-in (`treadle.reward.builtin`) or `package.module:function`, sync or async. It takes any of
`task`, `trajectory`, `response`, `ground_truth`, `messages`, `data_source` and `extra` by name, plus its configured
kwargs; verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` fits as it is. It returns a number,
a Score, or a map with "score" and whatever else it wants to report. A worker runs one score at a time; a function that
only waits for a server, such as a judge behind an API, is better off with `num_workers: 0`, where scores overlap.

Reward models are parts of the sum too: `treadle.reward.classifier` holds discriminative ones, `treadle.reward.judge`
generative ones, `treadle.reward.models` what they have in common. What follows is about functions.

What a worker process protects the run from
- Time: a score that passes `timeout_s` is killed with SIGKILL, with every process it started, in C code too.
- CPU: a score that uses more than `cpu_time_s` is killed by the kernel. Processes it starts are bounded by time only.
- Memory: private writable memory of the worker, and of each process it starts, is bounded by `memory_mb`.
- Crashes: exit, abort, segmentation fault or a full memory end one attempt of one score; the next gets a new process.
- Leftovers: what a score starts ends with it. A helper that should live on is started when the module is imported.
- The records: arguments are copies. Results come back as JSON of bounded size; the parent never unpickles them.
- Noise: standard input is empty; output and core dumps are dropped.
- The parent's death, by SIGKILL too: the kernel kills the worker's process group.
- Model text: built-ins whose packages evaluate it (`math`, `reasoning_gym`) run only in workers, and may there neither
  write, connect, start processes nor call native code.

What it does not protect from
- Malicious Python that you import yourself. A function runs as you, can read and write your files, use the network,
  and report any score it likes. Limits guard against accidents and hostile input, not against hostile code.
- Disk use, GPU memory and the number of processes a score starts.
- A process that moved to a session of its own, when the worker or the parent then dies by itself.
- Anything at all where `num_workers` is 0, except that async functions still have their deadline.

The kernel's part needs Linux; elsewhere memory, leftovers and the parent's death are guarded as far as POSIX goes.
Invariant: a Score is what the functions said. A timeout, a crash or a missing number is a RewardFailure.
"""
