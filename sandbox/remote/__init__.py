"""Workers on other machines, over NATS JetStream.

A pool's scheduler decides which worker gets what; the broker keeps each request until its
reply is kept, and each reply until the pool has it. So neither a broker nor a connection
that comes and goes loses anything, and what is delivered twice is done once.

    workers.py    the pool's side: who is there, who is silent; `link.py`: a way to one
    worker.py     the worker's side: one life of a worker; `__main__.py` starts it
    subjects.py   streams, subjects and announcements
    broker.py     a connection: publishing until it is kept; `puller.py`: what comes in
    mail.py       requests and replies as messages
    payloads.py   what is too large for one message; `snapshots.py`: a store made of it

Whoever may publish on a pool's subjects is trusted by it: its verdicts count. Let the
broker ask for credentials, and give them to nobody else. What comes off the wire is
nevertheless parsed strictly, and what is malformed is logged and dropped.
"""
