"""Shards a model's training state over ranks, with FSDP2's division of the work: shard.py has shard(), root.py the
state of a step, param_group.py the collectives, sharded_param.py one parameter. In eager mode, module_class.py and
eager.py make modules read whole weights. Nothing is imported here: libdc.torch has the public names."""
