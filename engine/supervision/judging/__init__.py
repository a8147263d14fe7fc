"""The end of an attempt, judged: from what is known of it to one verdict, its reason and its first cause in words.

Nothing here asks a node or writes state; `engine.supervision.witnesses` has heard everything before.
"""
