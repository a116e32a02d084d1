"""The engine: what runs a model, in its own process or in the caller's.

* ``core``: the loop over scheduler and executor. ``parts`` and ``build`` make what it drives; ``load`` measures it;
  ``watchdog`` ends it when it is stuck, and ``pulse`` is how the front notices one that cannot even do that.
* ``messages`` and ``frames``: what travels between the front and the core, and its encoding.
* ``process``, ``launch``, ``transport``: the core as a process; ``local``: the core in the caller's process.
* ``launcher``, ``client``: the front's side: start, watch and talk to a core process.
* ``async_engine``: requests as asynchronous iterators, with ``limits``, ``tokenization``, ``batching``, ``reader``.
* ``offline``: ``Engine``, with ``stepping``, ``offline_requests`` and ``result``.
"""
