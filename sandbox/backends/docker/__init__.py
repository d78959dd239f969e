"""Sandboxes in containers of Docker, by runc or by gVisor; the worker has to be root.

    worker ── dockerd ── main, the container's first process ── programs

One container for each sandbox, while something runs in it. Its first process is ours (see
`inside`): the worker talks to it over the stream that Docker attaches, since an exec by
Docker costs many times what one in a persistent shell does. The workspace is the worker's
own file system in memory, shown in the container: so it has a quota, can be read when all
is dead, and snapshots share it, as with the local backend.
"""
