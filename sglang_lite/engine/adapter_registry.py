"""The low-rank adapters that the front knows: names, slots, and who uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_lite.cache.namespace import adapter_namespace
from sglang_lite.frontend.fields import shorten
from sglang_lite.models.adapter_settings import MAX_NAME_LENGTH, AdapterSettings, NamedAdapter, is_adapter_name
from sglang_lite.types import RequestError


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that the engine has, or is getting or giving up.

    Attributes:
        named: its name and path.
        slot: where it lies.
        namespace: of the prefix cache. One that is loaded again gets another: its weights may have changed.
        ready: requests may use it.
        users: requests that do.
    """

    named: NamedAdapter
    slot: int
    namespace: str
    ready: bool = False
    users: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterRegistry:
    """Which adapter lies in which slot. Used by one event loop (or one thread).

    Args:
        settings: None when the server takes no adapters.
    """

    def __init__(self, settings: AdapterSettings | None) -> None:
        self._settings = settings
        self._adapters: dict[str, LoadedAdapter] = {}
        self._num_loaded = 0
        for adapter in settings.adapters if settings is not None else ():
            self.reserve(adapter).ready = True

    @property
    def num_slots(self) -> int:
        """Adapters that can be loaded at a time; 0 when the server takes none."""
        return self._settings.num_slots if self._settings is not None else 0

    @property
    def num_used(self) -> int:
        """Slots that are taken."""
        return len(self._adapters)

    @property
    def loaded(self) -> Mapping[str, str]:
        """Name -> path of the adapters that requests may use."""
        return {name: adapter.named.path for name, adapter in self._adapters.items() if adapter.ready}

    def reserve(self, adapter: NamedAdapter) -> LoadedAdapter:
        """Give an adapter a slot before it is loaded.

        Raises:
            RequestError: no adapters here, the name is taken or no name, or every slot is taken.
        """
        if self._settings is None:
            raise RequestError("the server was started without --enable-lora, so it cannot load adapters")
        if not is_adapter_name(adapter.name):
            raise RequestError(
                f"lora_name must have 1 to {MAX_NAME_LENGTH} characters and no ':', got {shorten(adapter.name)!r}",
                field="lora_name",
            )
        if adapter.name in self._adapters:
            raise RequestError(
                f"an adapter named {shorten(adapter.name)!r} is already loaded; unload it first", field="lora_name"
            )
        taken = {other.slot for other in self._adapters.values()}
        slot = next((slot for slot in range(self.num_slots) if slot not in taken), None)
        if slot is None:
            raise RequestError(
                f"all {self.num_slots} places for adapters are taken; unload one, or start the server with a larger "
                f"--max-loaded-loras"
            )
        self._num_loaded += 1
        loaded = self._adapters[adapter.name] = LoadedAdapter(
            adapter, slot, adapter_namespace(self._num_loaded, adapter.name)
        )
        loaded.unused.set()
        return loaded

    def forget(self, adapter: LoadedAdapter) -> None:
        """Give its slot and name back."""
        del self._adapters[adapter.named.name]

    def acquire(self, name: str) -> LoadedAdapter:
        """The adapter of a request, which is kept until ``release``.

        Raises:
            RequestError: there is none of that name.
        """
        adapter = self._adapters.get(name)
        if adapter is None or not adapter.ready:
            known = ", ".join(sorted(self.loaded)) or "none"
            raise RequestError(
                f"lora_path: adapter {shorten(name)!r} is not loaded; loaded adapters: {shorten(known)}",
                field="lora_path",
            )
        adapter.users += 1
        adapter.unused.clear()
        return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """A request is done with its adapter."""
        adapter.users -= 1
        if adapter.users == 0:
            adapter.unused.set()

    def retire(self, name: str) -> LoadedAdapter:
        """From now on no request can use the adapter; those that do go on.

        Raises:
            RequestError: there is none of that name, or it is being loaded or unloaded.
        """
        adapter = self._adapters.get(name)
        if adapter is None or not adapter.ready:
            raise RequestError(f"adapter {shorten(name)!r} is not loaded", field="lora_name")
        adapter.ready = False
        return adapter
