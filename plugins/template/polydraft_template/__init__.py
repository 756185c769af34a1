"""template as a backend of polydraft: who it is, and which device and kernels it brings."""

from __future__ import annotations

from polydraft import BackendInfo, Capabilities, hookimpl
from polydraft.backend import PassBuffers
from polydraft.contracts.base import Limits
from polydraft.errors import DeviceError
from polydraft.plugins.bring_up import BringUpMeta, BringUpTable, contract_versions
from polydraft_template.device import TemplateDevice
from polydraft_template.kernels import KERNELS


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Say who this is. Imports no driver: where one is missing, return `available=False` and a `reason`."""
    return BackendInfo(
        name="template",
        version="0.1.0",
        package="polydraft-template",
        device_pattern="template",
        summary="template, in bring-up",
        devices=("template",),
        capabilities=Capabilities(bring_up=True, pool_temporaries=True),
        contract_versions=contract_versions(KERNELS),
        evidence="double only",  # "silicon" once results were seen on the chip, and evidence_on="which chip, which day"
    )


@hookimpl
def polydraft_open_device(spec: str) -> TemplateDevice:
    """Open the chip that the user named after --device, "" for the first one."""
    if spec not in ("", "template"):
        raise DeviceError(f"device is {spec!r}, wanted 'template'; leave --device out")
    return TemplateDevice("template")


@hookimpl
def polydraft_kernels(device: TemplateDevice) -> BringUpTable:
    """Own kernels, and the reference for the rest."""
    return BringUpTable(device, own=KERNELS)


@hookimpl
def polydraft_init_forward_meta(device: TemplateDevice, buffers: PassBuffers, limits: Limits) -> BringUpMeta:
    """Attention metadata; the reference's until attention is an own kernel that wants another one."""
    return BringUpMeta(device, buffers, limits)
