"""Every fault has its key, its value and what is accepted, and all faults are reported at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config.documents import SIZE_LIMIT
from engine.config.load import load_config
from engine.config.mlx_lm_keys import KEYS
from engine.config.sources import placed
from engine.errors import ConfigError
from engine.security.redact import REDACTED
from tests.unit.config.documents import JOB, NODES, faults_of, load, only_fault

HUB = '[job]\nmodel = "m"\nhf_dataset = '
TWO = '[[node]]\n[[node]]\nname = "b"\nssh = "b.local"\npython = "/p"\n'

CASES = [
    # [cluster]
    ('[cluster]\nname = "a b"\n' + NODES + JOB, "cluster.name", "letters, digits"),
    ('[cluster]\nbackend = "mpi"\n' + NODES + JOB, "cluster.backend", "'auto', 'ring', 'jaccl'"),
    ("[cluster]\nstarting_port = 80\n" + NODES + JOB, "cluster.starting_port", "1024 or more"),
    ("[cluster]\nstarting_port = 65001\n" + NODES + JOB, "cluster.starting_port", "65000 or less"),
    ("[cluster]\nstarting_port = '9'\n" + NODES + JOB, "cluster.starting_port", "a whole number"),
    ("[cluster]\nnmae = 'x'\n" + NODES + JOB, "cluster.nmae", "did you mean name?"),
    ("cluster = 3\n" + NODES + JOB, "cluster", "[cluster] on its own line"),
    ("[clutser]\n" + NODES + JOB, "clutser", "did you mean cluster?"),
    # [checkpoint]
    ("[checkpoint]\nevery = 0\n" + NODES + JOB, "checkpoint.every", "1 or more"),
    ("[checkpoint]\nkeep = 0\n" + NODES + JOB, "checkpoint.keep", "1 or more"),
    ("[checkpoint]\ncompression = 'xz'\n" + NODES + JOB, "checkpoint.compression", "'none', 'gzip' or 'zstd'"),
    ("[checkpoint]\ndestination = '../x'\n" + NODES + JOB, "checkpoint.destination", "without .."),
    ("[checkpoint]\ndestination = 's3://a b'\n" + NODES + JOB, "checkpoint.destination", "without spaces"),
    ("[checkpoint]\nevrey = 3\n" + NODES + JOB, "checkpoint.evrey", "did you mean every?"),
    # [[node]]
    (JOB, "node", "at least one node"),
    ("node = []\n" + JOB, "node", "at least one node"),
    ("[node]\nname = 'a'\n" + JOB, "node", "double brackets"),
    ("node = [1]\n" + JOB, "node[0]", "a table"),
    ("[[node]]\n" * 10_000 + JOB, "node", "at most 64 nodes"),
    (NODES + '[[node]]\nname = "a"\n' + JOB, "node[2].name", "node[0] has this one"),
    ('[[node]]\nname = "a b"\n' + JOB, "node[0].name", "letters, digits"),
    ('[[node]]\nname = "a\\n"\n' + JOB, "node[0].name", "letters, digits"),
    ('[[node]]\nname = "a;id"\n' + JOB, "node[0].name", "letters, digits"),
    ('[[node]]\nname = "$(id)"\n' + JOB, "node[0].name", "letters, digits"),
    ('[[node]]\nname = "-a"\n' + JOB, "node[0].name", "letters, digits"),
    ('[[node]]\nname = ""\n' + JOB, "node[0].name", "letters, digits"),
    ("[[node]]\nname = 3\n" + JOB, "node[0].name", "a string in quotes"),
    ('[[node]]\nssh = "localhost"\n' + JOB, "node[0].ssh", "127.0.0.1: localhost may resolve to ::1"),
    ('[[node]]\nssh = "-oProxyCommand=id"\n' + JOB, "node[0].ssh", "[user@]host[:port]"),
    ('[[node]]\nssh = "a;id"\n' + JOB, "node[0].ssh", "[user@]host[:port]"),
    ('[[node]]\nssh = "$(id)"\n' + JOB, "node[0].ssh", "[user@]host[:port]"),
    ('[[node]]\nssh = "127.0.0.1\\n"\n' + JOB, "node[0].ssh", "[user@]host[:port]"),
    ('[[node]]\nips = ["ultra.local"]\n' + JOB, "node[0].ips[0]", "an IPv4 address"),
    ('[[node]]\nips = ["fe80::1"]\n' + JOB, "node[0].ips[0]", "no IPv6"),
    ('[[node]]\nips = ["0.0.0.0"]\n' + JOB, "node[0].ips[0]", "an IPv4 address"),
    ('[[node]]\nips = ["10.0.0.1\\n"]\n' + JOB, "node[0].ips[0]", "an IPv4 address"),
    ("[[node]]\nips = [" + "'10.0.0.1'," * 9 + "]\n" + JOB, "node[0].ips", "up to 8 entries"),
    ("[[node]]\nips = [4]\n" + JOB, "node[0].ips[0]", "a string in quotes"),
    ('[[node]]\nips = "127.0.0.1"\n' + JOB, "node[0].ips", "a list"),
    ('[[node]]\npython = "-c"\n' + JOB, "node[0].python", "does not begin with -"),
    ('[[node]]\npython = "py\\u0000"\n' + JOB, "node[0].python", "control characters"),
    ('[[node]]\nworkdir = "$HOME/x"\n' + JOB, "node[0].workdir", "variables are not"),
    ('[[node]]\nworkdir = "../x"\n' + JOB, "node[0].workdir", "without .."),
    ('[[node]]\nworkdir = "~nobody-of-that-name/x"\n' + JOB, "node[0].workdir", "an existing user"),
    ("[[node]]\nworkdir = true\n" + JOB, "node[0].workdir", "a string in quotes"),
    ('[[node]]\nmodel = ""\n' + JOB, "node[0].model", "a path"),
    ("[[node]]\n[[node]]\nshare = 0\n" + JOB, "node[1].share", "0.000001 or more"),
    ("[[node]]\nshare = -1.5\n" + JOB, "node[0].share", "0.000001 or more"),
    ("[[node]]\nshare = nan\n" + JOB, "node[0].share", "finite"),
    ("[[node]]\nshare = true\n" + JOB, "node[0].share", "a number"),
    ("[[node]]\nshare = 1e300\n" + JOB, "node[0].share", "1000000 or less"),
    ("[[node]]\nrdma = 'rdma_en2'\n" + JOB, "node[0].rdma", "a list"),
    ("[[node]]\npyhton = 'x'\n" + JOB, "node[0].pyhton", "did you mean python?"),
    # other machines
    *(
        (f"[[node]]\nssh = {host!r}\npython = '/p'\n" + JOB, "node[0].ssh", "[user@]host[:port]")
        for host in (
            *(
                "-oProxyCommand=id",
                "-l",
                "a;id",
                "a b",
                "a|b",
                "$(id)",
                "`id`",
                "../..",
                "a/b",
                "u@-h",
                "a@b@c",
                "",
                "@h",
            ),
            *("h:", "h:0", "h:65536", "h:22:22", "[::1", "[10.0.0.1]", "\u202eh", "h" * 300, "h%n", "h\\x", "u'@h"),
        )
        if "'" not in host and "\\" not in host
    ),
    ('[[node]]\nssh = "h\\nProxyCommand id"\npython = "/p"\n' + JOB, "node[0].ssh", "[user@]host[:port]"),
    ('[[node]]\nssh = "LOCALHOST"\npython = "/p"\n' + JOB, "node[0].ssh", "localhost may resolve to ::1"),
    ('[[node]]\nssh = "ana@localhost:22"\npython = "/p"\n' + JOB, "node[0].ssh", "localhost may resolve to ::1"),
    ('[[node]]\nssh = "h"\n' + JOB, "node[0].python", "absolute, or below the home directory"),
    *(
        (f'[[node]]\nssh = "h"\npython = "{text}"\n' + JOB, "node[0].python", accepted)
        for text, accepted in (
            *(
                ("python3", "~/…"),
                ("bin/python", "~/…"),
                ("~ana/python", "~/…"),
                ("~/../p", "without .."),
            ),
            *(
                ("-c", "begin with -"),
                ("~/$(id)", "variables are not"),
                ("/p\\n", "control characters"),
            ),
            ("", "a path"),
        )
    ),
    ('[[node]]\nssh = "h"\npython = "/p"\nworkdir = "w"\n' + JOB, "node[0].workdir", "~/…"),
    ('[[node]]\nssh = "h"\npython = "/p"\nmodel = "m"\n' + JOB, "node[0].model", "~/…"),
    ('[[node]]\nssh = "h"\npython = "/p"\n[job]\nmodel = "~root/m"\ndata = "d"\n', "job.model", "~/…"),
    (
        '[node_defaults]\npython = "python3"\n[[node]]\nssh = "h"\n[[node]]\nname = "b"\nssh = "i"\n' + JOB,
        "node_defaults.python",
        "~/…",
    ),
    ("[node_defaults]\npython = 3\n" + NODES + JOB, "node_defaults.python", "a string in quotes"),
    ("[node_defaults]\nips = []\n" + NODES + JOB, "node_defaults.ips", "a known key: data, model, python, workdir"),
    ("node_defaults = 3\n" + NODES + JOB, "node_defaults", "[node_defaults] on its own line"),
    ("[node_defaults]\nmodel = '/m'\n" + NODES + "[job]\ncommand = ['a']\n", "node_defaults.model", "a command"),
    (TWO + 'ips = ["127.0.0.1"]\n' + JOB, "node[1].ips[0]", "at which the other hosts can reach this one"),
    (
        '[[node]]\nips = ["10.0.0.1"]\n' + TWO.partition("\n")[2] + 'ips = ["10.0.0.1"]\n' + JOB,
        "node[1].ips[0]",
        "node[0] is another host",
    ),
    (TWO + 'rdma = ["rdma_en4"]\n' + JOB, "node[1].rdma", "2 entries"),
    (TWO + 'rdma = ["rdma_en4", "rdma_en5"]\n' + JOB, "node[1].rdma[1]", '"" for the node itself'),
    (TWO + 'rdma = ["a;id", ""]\n' + JOB, "node[1].rdma[0]", "the name of an RDMA device"),
    (TWO + "rdma = [4, '']\n" + JOB, "node[1].rdma[0]", "the name of an RDMA device"),
    (
        '[cluster]\nbackend = "jaccl"\n[[node]]\nname = "a"\nrdma = ["", ""]\n'
        + TWO.partition("\n")[2]
        + 'rdma = ["rdma_en4", ""]\n'
        + JOB,
        "node[0].rdma",
        "a device for rank 1 too",
    ),
    ("[cluster]\nlauncher = 'mpirun'\n" + NODES + JOB, "cluster.launcher", "'mlx.launch' or 'direct'"),
    # [job]
    (NODES, "job.model", "or command"),
    ("job = 1\n" + NODES + "", "job", "[job] on its own line"),
    (NODES + "[job]\ndata = 'd'\n", "job.model", "a directory in mlx-lm's format"),
    (NODES + "[job]\nmodel = 'm'\n", "job.data", "train.jsonl"),
    (NODES + JOB + "name = 'a b'", "job.name", "letters, digits"),
    (NODES + JOB + "name = 7", "job.name", "a string in quotes"),
    (NODES + JOB + "batch_size = 1", "job.batch_size", "2 or more: the global batch is divided over 2 nodes"),
    (NODES + JOB + "batch_size = 0", "job.batch_size", "a whole number, 1 or more"),
    (NODES + JOB + "batch_size = '8'", "job.batch_size", "a whole number"),
    (NODES + JOB + "batch_size = 8.0", "job.batch_size", "a whole number"),
    (NODES + JOB + "batch_size = true", "job.batch_size", "a whole number"),
    (NODES + JOB + "bacth_size = 8", "job.bacth_size", "did you mean batch_size?"),
    (NODES + JOB + "iters = 0", "job.iters", "1 or more"),
    (NODES + JOB + "iters = -3", "job.iters", "1 or more"),
    (NODES + JOB + "iters = 0x" + "f" * 6000, "job.iters", "a whole number up to 9223372036854775807"),
    (NODES + JOB + "[checkpoint]\nevery = 1" + "0" * 400, "checkpoint.every", "a whole number up to 92"),
    (NODES + JOB + "env = {A = [1, -1" + "0" * 400 + "]}", "job.env.A[1]", "a whole number up to 92"),
    # The time that tomllib takes for a key grows with the square of its parts.
    (NODES + JOB + ".".join(["a"] * 100_000) + " = 1", "line 8", "keys of at most 64 parts"),
    (NODES + JOB + "[" + " . ".join(['"a"'] * 100_000) + "]", "line 8", "keys of at most 64 parts"),
    (NODES + JOB + "learning_rate = nan", "job.learning_rate", "finite"),
    (NODES + JOB + "learning_rate = inf", "job.learning_rate", "finite"),
    (NODES + JOB + "learning_rate = 2026-11-21", "job.learning_rate", "finite"),
    (NODES + JOB + "optimizer = 'lion'", "job.optimizer", "one of adam, adamw"),
    (NODES + JOB + "optimizer_config = {adamw = {weight_deacy = 0.1}}", "job.optimizer_config", "weight_decay"),
    (NODES + JOB + "fine_tune_type = 'qlora'", "job.fine_tune_type", "one of lora, dora, full"),
    (NODES + JOB + "strategy = 'magic'", "job.strategy", "'data'"),
    (NODES + JOB + "layer_split = '0-2,2-4'", "job.layer_split", 'strategy = "pipeline"'),
    (NODES + JOB + "strategy = 'pipeline'\nlayer_split = '0-2;2-4'", "job.layer_split", "one range per rank"),
    (NODES + JOB + "strategy = 'pipeline'\nlayer_split = '0-2,3-4'", "job.layer_split", "does not continue at layer 2"),
    (NODES + JOB + "strategy = 'pipeline'\nlayer_split = '0-2,2-3,3-4'", "job.layer_split", "2 ranges"),
    (NODES + JOB + "strategy = 'pipeline'\nlayer_split = 4", "job.layer_split", "a string"),
    (NODES + JOB + "chunk_size = 0", "job.chunk_size", "1 or more"),
    (NODES + JOB + "chunk_size = -100", "job.chunk_size", "1 or more"),
    (NODES + JOB + "chunk_size = 'all'", "job.chunk_size", "a whole number"),
    (NODES + JOB + "chunking = 'no'", "job.chunking", "true or false"),
    (NODES + JOB + "grad_checkpoint = 0", "job.grad_checkpoint", "a whole number, 1 or more"),
    (NODES + JOB + "grad_checkpoint = 'all'", "job.grad_checkpoint", "auto"),
    (NODES + JOB + "wire = 'int4'", "job.wire", "auto, float32, int8"),
    (NODES + JOB + "strategy = 'sharded'\nwire = 'int8'", "job.wire", 'strategy = "sharded" sends no int8'),
    (NODES + JOB + "strategy = 'pipeline'\nwire = 'int8'", "job.wire", 'strategy = "pipeline" sends no int8'),
    ("[[node]]\n" + JOB + "strategy = 'local'", "job.strategy", "at least two nodes"),
    (NODES + JOB + "local_steps = 16", "job.local_steps", 'no value here, unless strategy = "local"'),
    (NODES + JOB + "strategy = 'sharded'\nouter_momentum = 0", "job.outer_momentum", 'unless strategy = "local"'),
    (NODES + JOB + "outer_learning_rate = 1", "job.outer_learning_rate", 'unless strategy = "local"'),
    (NODES + JOB + "strategy = 'local'\nlocal_steps = 0", "job.local_steps", "a whole number from 1 to 10000"),
    (NODES + JOB + "strategy = 'local'\nlocal_steps = 10001", "job.local_steps", "a whole number from 1 to 10000"),
    (NODES + JOB + "strategy = 'local'\nouter_learning_rate = 0", "job.outer_learning_rate", "above 0, at most 2"),
    (NODES + JOB + "strategy = 'local'\nouter_learning_rate = 2.5", "job.outer_learning_rate", "above 0, at most 2"),
    (NODES + JOB + "strategy = 'local'\nouter_momentum = 1", "job.outer_momentum", "0 to below 1"),
    (NODES + JOB + "strategy = 'local'\nouter_momentum = -0.1", "job.outer_momentum", "0 to below 1"),
    (NODES + JOB + "max_grad_norm = 0", "job.max_grad_norm", "above 0"),
    (NODES + JOB + "optimizer_precision = 'bfloat16'", "job.optimizer_precision", "kahan, stochastic, parameter"),
    (NODES + JOB + "moments = '4bit'", "job.moments", "one of auto, float32, bfloat16, 8bit"),
    (NODES + JOB + "lora_parameters = {rank = 8, alpha = 16}", "job.lora_parameters", "no alpha"),
    (NODES + JOB + "lr_schedule = {name = 'warm'}", "job.lr_schedule", "cosine_decay"),
    (NODES + JOB + "train = false", "job.train", "true"),
    (NODES + JOB + "iters = 4\ngrad_accumulation_steps = 5", "job.grad_accumulation_steps", "never updated"),
    (NODES + JOB + "iters = 4\nepochs = 5", "job.epochs", "iters is set, and it is one or the other"),
    (NODES + JOB + "epochs = 0", "job.epochs", "a number above 0"),
    (NODES + JOB + "epochs = inf", "job.epochs", "a number above 0"),
    (NODES + JOB + "epochs = true", "job.epochs", "a number above 0"),
    (NODES + JOB + "patience = 0", "job.patience", "1 or more"),
    (NODES + JOB + "save_best = 1", "job.save_best", "true or false"),
    (NODES + JOB + "patience = 3\nval_batches = 0", "job.patience", "no validation to judge by"),
    (NODES + JOB + "save_best = true\nval_batches = 0", "job.save_best", "no validation to judge by"),
    (NODES + HUB + "[{path = 'a/b'}, {path = 'c/d'}]", "job.hf_dataset", "mlx_lm.lora joins several"),
    (NODES + HUB + "'org/set'", "job.hf_dataset", 'path = "org/set"'),
    (NODES + HUB + "{path = '/data/set'}", "job.hf_dataset.path", "a folder is named in data"),
    (NODES + HUB + "{train_split = 'train'}", "job.hf_dataset.path", "required"),
    (NODES + HUB + "{path = 'a/b', train_split = 'train[:80'}", "job.hf_dataset.train_split", "train[:80%]"),
    (NODES + HUB + "{path = 'a/b', split = 'train'}", "job.hf_dataset.split", "a known key"),
    (
        NODES + HUB + "{path = 'a/b', config = {data_files = 'x'}}",
        "job.hf_dataset.config.data_files",
        "name or revision",
    ),
    (NODES + HUB + "{path = 'a/b', config = {name = '../x'}}", "job.hf_dataset.config.name", "folder"),
    (NODES + HUB + "{path = 'a/b'}\ntest = true", "job.hf_dataset.test_split", "test = true"),
    (NODES + HUB + "{path = 'a/b'}\n[data]\nsubset = 'x'\nsplits = {train = 'x'}", "data.splits", "hf_dataset"),
    (NODES + JOB + "[data]\nsubset = '..'", "data.subset", "folder"),
    (NODES + '[job]\nmodel = "m"\ndata = "hf:pushed/rows"', "job.data", "[data] push = true"),
    (NODES + '[job]\nmodel = "m"\ndata = "hf:"', "job.data", "hf:org/set"),
    (NODES + '[job]\nmodel = "m"\ndata = "hf:org/set main"', "job.data", "[data] subset"),
    (NODES + JOB + "[data]\nsplits = {valid = 'test'}", "data.splits", "train"),
    (NODES + JOB + "[data]\nsplits = {train = 'train[10'}", "data.splits", "train[:80%]"),
    # keys of earlier mlx-lm
    (NODES + JOB + "lora_layers = 4", "job.lora_layers", "num_layers"),
    (NODES + JOB + "lora-layers = 4", "job.lora-layers", "num_layers"),
    (NODES + JOB + "adapter_file = 'adapters.npz'", "job.adapter_file", "adapter_path"),
    (NODES + JOB + "use_dora = true", "job.use_dora", 'fine_tune_type = "dora"'),
    (NODES + JOB + "lora_rank = 16", "job.lora_rank", "lora_parameters = {rank"),
    (NODES + JOB + "lora_alpha = 16", "job.lora_alpha", "alpha / rank"),
    (NODES + JOB + "wandb = 'project'", "job.wandb", 'report_to = "wandb"'),
    (NODES + JOB + "max_tokens = 9", "job.max_tokens", "mlx_lm.generate"),
    (NODES + JOB + "batch-size = 9", "job.batch-size", "did you mean batch_size?"),
    (NODES + JOB + "clear_cache_threshold = '2 bottles'", "job.clear_cache_threshold", '"2GB"'),
    (NODES + JOB + "clear_cache_threshold = '9999999T'", "job.clear_cache_threshold", '"2GB"'),
    (NODES + '[job]\nmodel = "-m"\ndata = "d"\n', "job.model", "does not begin with -"),
    (NODES + '[job]\nmodel = "a\\nb"\ndata = "d"\n', "job.model", "control characters"),
    (NODES + '[job]\nmodel = "m"\ndata = "$(id)"\n', "job.data", "a plain path"),
    (NODES + JOB + "config = 'absent.yaml'", "the file", "[job] config"),
    (NODES + JOB + "config = 3", "job.config", "a path"),
    (NODES + JOB + 'adapter_path = "a\\u0000"', "job.adapter_path", "not empty"),
    # [job] command
    (NODES + "[job]\ncommand = ['a']\nmodel = 'm'\n", "job.model", "a command has its own"),
    (NODES + "[job]\ncommand = ['a']\niters = 3\n", "job.iters", "a command has its own"),
    (NODES + "[job]\ncommand = ['a']\nchunk_size = 9\n", "job.chunk_size", "a command has its own"),
    (NODES + "[job]\ncommand = []\n", "job.command", "not empty"),
    (NODES + "[job]\ncommand = ['']\n", "job.command", "not empty"),
    (NODES + "[job]\ncommand = 'python x.py'\n", "job.command", "a list of strings"),
    (NODES + "[job]\ncommand = ['-rf']\n", "job.command[0]", "the name or path of a program"),
    (NODES + "[job]\ncommand = ['a', 3]\n", "job.command[1]", "a string in quotes"),
    (NODES + '[job]\ncommand = ["a", "b\\u0000"]\n', "job.command[1]", "without NUL"),
    (NODES + "[job]\ncommand = ['a']\nenv = {MLX_RANK = '0'}\n", "job.env.MLX_RANK", "are reserved"),
    (NODES + "[job]\ncommand = ['a']\nenv = {'a=b' = '0'}\n", "job.env.'a=b'", "a variable name"),
    (NODES + "[job]\ncommand = ['a']\nenv = {A = 1}\n", "job.env.A", "a string in quotes"),
    ("[[node]]\nshare = 2\n[job]\ncommand = ['a']\n", "node[0].share", "the job is a command"),
    ("[[node]]\nmodel = 'm'\n[job]\ncommand = ['a']\n", "node[0].model", "the job is a command"),
    (NODES + JOB + "learning_rate = 'much'", "job.learning_rate", "above 0, or auto"),
    ("[[node]]\nvalidate = 1\n" + JOB, "node[0].validate", "true or false"),
    ("[[node]]\nvalidates = false\n" + JOB, "node[0].validates", "did you mean validate?"),
    ("[[node]]\nvalidate = false\n" + JOB, "node[0].validate", "true on one node at least, or val_batches = 0"),
    ("[[node]]\nvalidate = false\n[[node]]\n" + JOB + "strategy = 'sharded'", "node[0].validate", "no value here"),
    # the rest
    (NODES + JOB + "[preflight]\nall_sum_s = 0", "preflight.all_sum_s", "above 0"),
    (NODES + JOB + "[preflight]\nskip = 'ports'", "preflight.skip", "a list"),
    (NODES + JOB + "[preflight]\nskip = ['port_free']", "preflight.skip[0]", "one of 'ssh_connectivity'"),
    (NODES + JOB + "[preflight]\nsync_script = '../x.sh'", "preflight.sync_script", "a path without .."),
    (NODES + JOB + "[preflight]\nsync_script = '$(id)'", "preflight.sync_script", "a plain path"),
    (NODES + JOB + "[preflight]\nsync_script = '-rf'", "preflight.sync_script", "does not begin with -"),
    (NODES + JOB + "data_quality_report = '../report.json'", "job.data_quality_report", "a path without .."),
    (NODES + JOB + "[preflight]\nroots = ['/a/../b']", "preflight.roots[0]", "a path without .."),
    (NODES + JOB + "[preflight]\nroots = ['here']", "preflight.roots[0]", "absolute, or below the home directory"),
    (NODES + JOB + "[preflight]\nconsistency_threshold = 1.5", "preflight.consistency_threshold", "1 or less"),
    (NODES + JOB + "[recovery]\nmin_nodes = 3", "recovery.min_nodes", "at most 2, the number of nodes"),
    (NODES + JOB + "[recovery]\nmax_restarts = -1", "recovery.max_restarts", "0 or more"),
    (NODES + JOB + "[recovery]\nlease_s = 1", "recovery.lease_s", "3 or more"),
    (NODES + JOB + "[recovery]\nlease_s = inf", "recovery.lease_s", "finite"),
    (NODES + JOB + "[recovery]\nwithout_state = 'anew'", "recovery.without_state", "'restart' or 'fail'"),
    (NODES + JOB + "[recovery]\nrestart_from_scratch_within = 1.5", "recovery.restart_from_scratch_within", "a whole"),
    (NODES + JOB + "[recovery]\nrestart_from_scratch_within_s = -1", "recovery.restart_from_scratch_within_s", "0 or"),
    (NODES + JOB + "[recovery]\non_lease_expiry = 'die'", "recovery.on_lease_expiry", "'end' or 'continue'"),
    (NODES + JOB + "[ui]\nascii = 'no'", "ui.ascii", "true or false"),
    (NODES + JOB + "[ui]\ntheme = 'solarised'", "ui.theme", "one of 'textual-dark'"),
]


@pytest.mark.parametrize(("text", "key", "accepted"), CASES, ids=[f"{n}-{case[1]}" for n, case in enumerate(CASES)])
def test_a_fault_names_its_key_and_what_is_accepted(tmp_path: Path, text: str, key: str, accepted: str) -> None:
    faults = faults_of(tmp_path, text)
    found = [fault for fault in faults if fault.key == key]
    assert len(found) == 1, [str(fault) for fault in faults]
    assert accepted in found[0].accepted
    # "job = 1" also lacks a model; everything else is one fault and nothing that follows from it.
    assert len(faults) == 1 or key == "job"


def test_all_faults_come_at_once_and_each_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("iters: none\nlearning_rte: 1e-5\n")
    text = (
        "[cluster]\nbackend = 'mpi'\n[[node]]\nname = 'a'\nshare = 0\n[[node]]\nname = 'b'\nssh = 'localhost'\n"
        "[[node]]\nname = 'c'\n[[node]]\nname = 'c'\n"
        "[job]\nmodel = 'm'\ndata = 'd'\nconfig = 'lora.yaml'\nbatch_size = 'x'\npasses = 2\n[ui]\nascii = 1\n"
    )
    faults = faults_of(tmp_path, text)
    assert {fault.key for fault in faults} == {
        *("cluster.backend", "node[0].share", "node[1].ssh", "node[3].name"),
        *("job.batch_size", "job.passes", "iters", "learning_rte", "ui.ascii"),
    }
    assert {fault.file for fault in faults if fault.key in ("iters", "learning_rte")} == {str(tmp_path / "lora.yaml")}
    assert len(str(ConfigError(faults)).splitlines()) == len(faults)


def test_a_fault_of_one_key_does_not_hide_faults_between_keys(tmp_path: Path) -> None:
    text = "[[node]]\nname = 'a'\n[[node]]\nname = 'a'\nshare = 0\n[job]\nmodel = 'm'\nbatch_size = 1\niters = 0\n"
    assert {fault.key for fault in faults_of(tmp_path, text)} == {
        *("node[1].name", "node[1].share", "job.batch_size", "job.iters", "job.data"),
    }


def test_a_fault_reads_as_a_sentence(tmp_path: Path) -> None:
    fault = faults_of(tmp_path, NODES + JOB + "iters = 0")[0]
    assert str(fault) == f"{tmp_path}/flightdeck.toml: job.iters = 0: expected a whole number, 1 or more"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (NODES + JOB + "hf_token = 'hush-hush'", "job.hf_token"),
        (NODES + JOB + "env = {'WANDB-KEY' = 'hush-hush'}", "job.env.WANDB-KEY"),
        (NODES + JOB + "env = {FLIGHTDECK_SECRET = 'hush-hush'}", "job.env.FLIGHTDECK_SECRET"),
        (NODES + JOB + "env = {A = ['hush-hush']}", "job.env.A"),
        (NODES + JOB + "env = ['A=hush-hush']", "job.env"),
        (NODES + JOB + "[env]\nA = 'hush-hush'", "env"),
        (NODES + JOB + "report = {api_key = 'hush-hush'}", "job.report"),
        (NODES + JOB + "report = {api_key = 'hush'}", "job.report"),
        (NODES + JOB + "report = {a = [{token = 'hush'}]}", "job.report"),
        ("[node]\nenv = {FOO = 'hush'}\n" + JOB, "node"),
        (NODES + JOB + "report = ['--hf_token', 'hush-hush']", "job.report"),
        (NODES + JOB + "[notify]\nwebhooks = [{url = 'env:A', token = 'hush-hush'}]", "notify.webhooks[0].token"),
    ],
)
def test_a_fault_shows_no_secret_nor_does_its_line(tmp_path: Path, text: str, key: str) -> None:
    faults = faults_of(tmp_path, text)
    assert [fault.key for fault in faults] == [key]
    assert REDACTED in faults[0].value
    assert not any("hush" in f"{one.what} {one.text}" for one in placed(ConfigError(faults)))


def test_an_unknown_key_of_a_table_in_a_list_names_the_one_that_is_meant(tmp_path: Path) -> None:
    text = NODES + JOB + "[notify]\nwebhooks = [{url = 'env:A', formt = 'slack'}]"
    assert only_fault(tmp_path, text) == (
        *("notify.webhooks[0].formt", "'slack'", "a known key; did you mean format?"),
    )


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "flightdeck.toml")
    assert len(raised.value.faults) == 1
    assert "-c FILE" in str(raised.value)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(ConfigError) as raised:
            load_config(path)
        assert len(raised.value.faults) == 1


def test_a_file_too_large_is_refused_by_its_size(tmp_path: Path) -> None:
    file = tmp_path / "flightdeck.toml"
    with file.open("wb") as large:
        large.truncate(SIZE_LIMIT + 10**12)
    with pytest.raises(ConfigError, match="1,000,000 bytes"):
        load_config(file)


def test_a_syntax_error_says_its_line(tmp_path: Path) -> None:
    assert only_fault(tmp_path, '[cluster]\nname = "x\n')[0] == "line 2"
    assert only_fault(tmp_path, b'[cluster]\n# \xff\nname = "x"\n')[:2] == ("line 2", "b'\\xff'")
    (tmp_path / "lora.yaml").write_text("iters: 3\nseed: [1, 2\n")
    assert only_fault(tmp_path, NODES + JOB + "config = 'lora.yaml'")[0].startswith("line ")


@pytest.mark.parametrize(
    "yaml",
    [
        "- 1\n",
        "just text\n",
        "a: 2020-13-45\n",
        "a: !!int x\n",
        "[" * 800,
        "a: !!python/object:os.system 1\n",
        "a: \x01",
    ],
    ids=("list", "text", "date", "number", "nesting", "object", "control"),
)
def test_a_yaml_that_is_none_is_one_fault(tmp_path: Path, yaml: str) -> None:
    (tmp_path / "lora.yaml").write_text(yaml)
    faults = faults_of(tmp_path, NODES + JOB + "config = 'lora.yaml'")
    assert [fault.file for fault in faults] == [str(tmp_path / "lora.yaml")]


def test_a_yaml_of_growing_aliases_is_refused_without_growing(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    (tmp_path / "lora.yaml").write_text("\n".join([*levels, "lora_parameters: *a59", "optimizer_config: {adam: *a59}"]))
    keys = {fault.key for fault in faults_of(tmp_path, NODES + JOB + "config = 'lora.yaml'")}
    assert {"lora_parameters", "optimizer_config", "the file"} <= keys


def test_flight_decks_own_keys_are_refused_in_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("command: [rm]\n")
    key, _, accepted = only_fault(tmp_path, NODES + JOB + "config = 'lora.yaml'")
    assert (key, accepted) == ("command", "no value here: this key belongs in flightdeck.toml")


def test_an_overridden_value_of_the_yaml_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text("iters: many\n")
    assert load(tmp_path, NODES + JOB + "iters = 3\nconfig = 'lora.yaml'").job.mlx_lm["iters"] == 3


@pytest.mark.parametrize(
    "text",
    ["x = " + "[" * 5000, "x = " + "{a=" * 5000, "x" + ".x" * 3000 + " = 1", "x = " + "9" * 5000],
    ids=("lists", "tables", "dotted", "number"),
)
def test_deep_nesting_and_endless_numbers_are_faults(tmp_path: Path, text: str) -> None:
    assert len(faults_of(tmp_path, text + "\n" + NODES + JOB)) == 1


def test_a_thousand_unknown_keys_are_counted(tmp_path: Path) -> None:
    faults = faults_of(tmp_path, NODES + JOB + "\n".join(f"zz{n} = 1" for n in range(1000)))
    assert len(faults) == 21
    assert faults[-1].value == "(980 more keys)"


def test_hostile_values_are_printed_harmless_and_short(tmp_path: Path) -> None:
    _, value, _ = only_fault(tmp_path, NODES + JOB + 'optimizer = "\\u001b[2J\\u202e' + "x" * 500 + '"')
    assert value.isprintable()
    assert len(value) <= 80


_SCALARS = st.one_of(
    st.text(max_size=12).map(lambda text: '"' + "".join(f"\\U{ord(sign):08x}" for sign in text) + '"'),
    st.integers().map(str),
    st.floats().map(repr),
    st.sampled_from(["true", "false", "1979-05-27", "07:32:00", "[]", "{}", "[[1], {a = 1}]", '"a;id"', '"127.0.0.1"']),
)
_VALUES = st.one_of(_SCALARS, st.lists(_SCALARS, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"))
_NAMES = st.sampled_from(
    [*KEYS, "name", "ssh", "ips", "python", "workdir", "share", "command", "env", "strategy", "skip"]
)
_TABLE = st.dictionaries(_NAMES, _VALUES, max_size=6).map(lambda keys: "\n".join(f"{k} = {v}" for k, v in keys.items()))
_HEADER = st.sampled_from(
    ["[cluster]", "[[node]]", "[[node]]", "[job]", "[preflight]", "[recovery]", "[ui]", "[job.env]"]
)
_DOCUMENT = st.lists(st.tuples(_HEADER, _TABLE), max_size=6).map(lambda parts: "\n".join("\n".join(p) for p in parts))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(_DOCUMENT.map(str.encode), _DOCUMENT.map(lambda text: (text + JOB).encode()), st.binary(max_size=80))
)
def test_no_document_raises_anything_but_a_config_error(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "flightdeck.toml"
    file.write_bytes(text)
    try:
        load_config(file)
    except ConfigError as error:
        assert error.faults
        assert all(str(fault).isprintable() for fault in error.faults)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.dictionaries(_NAMES, st.text(max_size=20), max_size=5), raw=st.binary(max_size=60))
def test_no_yaml_raises_anything_but_a_config_error(tmp_path: Path, lines: dict[str, str], raw: bytes) -> None:
    (tmp_path / "lora.yaml").write_bytes("\n".join(f"{k}: {v}" for k, v in lines.items()).encode() + b"\n" + raw)
    (tmp_path / "flightdeck.toml").write_text(NODES + JOB + "config = 'lora.yaml'")
    try:
        load_config(tmp_path / "flightdeck.toml")
    except ConfigError as error:
        assert error.faults
