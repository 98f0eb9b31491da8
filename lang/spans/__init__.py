"""What a program did, and when: its calls as spans, as a page to look at and as a Perfetto trace."""
