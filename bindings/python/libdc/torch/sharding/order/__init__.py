"""The order of a step's collectives on this rank. exec_order.py records it and prefetches; agreed_order.py keeps ranks
in step whose programs take different paths."""
