"""The order of a step's collectives on this rank: exec_order.py learns it and prefetches, and agreed_order.py keeps
ranks together whose programs take different paths."""
