"""Paged attention on CPUs.

A *lane* is one (token, query head) pair: the unit that has its own running maximum, running sum and accumulators. A
*tile* is a group of tokens whose lanes read keys and values together; its lanes of one key head lie side by side. A
*split* is 256 cached positions (4 blocks of 64), which each lane computes from a fresh start.
"""
