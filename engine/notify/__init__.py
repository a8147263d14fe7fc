"""Tells people what has happened: the channels of [notify], and what is sent by them."""
