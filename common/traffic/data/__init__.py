"""Traces that come with the package; NOTICE.md says where they are from and under which licence."""
