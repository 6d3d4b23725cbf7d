"""Where updates wait to be fetched: memory, a directory (or object store), shared memory, HTTP. One protocol for all."""
