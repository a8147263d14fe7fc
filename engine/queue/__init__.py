"""The queue of a home: runs that start one after the other, each when its nodes are free."""
