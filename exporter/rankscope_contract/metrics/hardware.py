"""Metrics of the machine under a rank: its arithmetic, its process, its device's memory, its GPU and its host."""

from __future__ import annotations

from rankscope_contract.metrics.spec import counter, gauge

RESIDENT_BYTES = gauge(
    "rankscope_process_resident_memory_bytes",
    "Resident memory of the training process.",
    unit="bytes",
    stored_as="scalars:resident_memory_bytes",
)
DEVICE_ALLOCATED_BYTES = gauge(
    "rankscope_device_memory_allocated_bytes",
    "Device memory held by tensors.",
    unit="bytes",
    stored_as="scalars:device_memory_allocated_bytes",
)
DEVICE_RESERVED_BYTES = gauge(
    "rankscope_device_memory_reserved_bytes",
    "Device memory held by torch's allocator.",
    unit="bytes",
    stored_as="scalars:device_memory_reserved_bytes",
)
DEVICE_ALLOCATED_PEAK_BYTES = gauge(
    "rankscope_device_memory_allocated_peak_bytes",
    "The most that tensors have held since the process began, or since the script reset torch's peak.",
    unit="bytes",
    stored_as="scalars:device_memory_allocated_peak_bytes",
)
DEVICE_RESERVED_PEAK_BYTES = gauge(
    "rankscope_device_memory_reserved_peak_bytes",
    "The most that torch's allocator has held, likewise.",
    unit="bytes",
    stored_as="scalars:device_memory_reserved_peak_bytes",
)
DEVICE_ALLOC_RETRIES = counter(
    "rankscope_device_memory_alloc_retries_total",
    "Allocations that succeeded only after torch had given its cache back: training waits for the device meanwhile.",
    stored_as="scalars:device_memory_alloc_retries_total",
)
DEVICE_OOMS = counter(
    "rankscope_device_memory_ooms_total",
    "Allocations that failed for want of memory, also those that the script caught.",
    stored_as="scalars:device_memory_ooms_total",
)
TFLOPS_PER_GPU = gauge(
    "rankscope_tflops_per_gpu",
    "TFLOP/s of the model on this rank's device in the latest step; method says how its FLOPs are known.",
    "method",
    stored_as="scalars:tflops_per_gpu",
)
MFU = gauge(
    "rankscope_mfu_ratio",
    "The same over the peak of the device; without what is computed a second time. Absent where no peak is known.",
    "method",
    stored_as="scalars:mfu",
)
GPU_UTILIZATION = gauge(
    "rankscope_gpu_utilization_ratio",
    "Share of the driver's last sample period in which any kernel ran.",
    "gpu",
    stored_as="scalars:gpu_utilization",
)
GPU_MEMORY_UTILIZATION = gauge(
    "rankscope_gpu_memory_utilization_ratio",
    "Share of it in which device memory was read or written.",
    "gpu",
    stored_as="scalars:gpu_memory_utilization",
)
GPU_MEMORY_USED_BYTES = gauge(
    "rankscope_gpu_memory_used_bytes",
    "Device memory in use, by all processes.",
    "gpu",
    unit="bytes",
    stored_as="scalars:gpu_memory_used_bytes",
)
GPU_MEMORY_TOTAL_BYTES = gauge(
    "rankscope_gpu_memory_total_bytes",
    "Device memory there is.",
    "gpu",
    unit="bytes",
    stored_as="scalars:gpu_memory_total_bytes",
)
GPU_POWER_WATTS = gauge(
    "rankscope_gpu_power_watts", "What the board draws.", "gpu", unit="watts", stored_as="scalars:gpu_power_watts"
)
GPU_POWER_LIMIT_WATTS = gauge(
    "rankscope_gpu_power_limit_watts",
    "What the board may draw.",
    "gpu",
    unit="watts",
    stored_as="scalars:gpu_power_limit_watts",
)
GPU_ENERGY_JOULES = counter(
    "rankscope_gpu_energy_joules_total",
    "What the board has used since its driver was loaded.",
    "gpu",
    unit="joules",
    stored_as="scalars:gpu_energy_joules_total",
)
GPU_TEMPERATURE_CELSIUS = gauge(
    "rankscope_gpu_temperature_celsius",
    "Temperature by sensor: gpu or memory.",
    "gpu",
    "sensor",
    unit="celsius",
    stored_as="scalars:gpu_temperature_celsius",
)
GPU_CLOCK_HERTZ = gauge(
    "rankscope_gpu_clock_hertz",
    "Clock of the multiprocessors (sm) or the memory.",
    "gpu",
    "clock",
    unit="hertz",
    stored_as="scalars:gpu_clock_hertz",
)
GPU_CLOCK_LIMIT_HERTZ = gauge(
    "rankscope_gpu_clock_limit_hertz",
    "The highest it can be.",
    "gpu",
    "clock",
    unit="hertz",
    stored_as="scalars:gpu_clock_limit_hertz",
)
GPU_THROTTLED = gauge(
    "rankscope_gpu_throttled",
    "1 for each reason that keeps the clocks down, 0 for the others.",
    "gpu",
    "reason",
    stored_as="scalars:gpu_throttled",
)
GPU_ECC_ERRORS = counter(
    "rankscope_gpu_ecc_errors_total",
    "Memory errors since the driver was loaded, corrected or uncorrected.",
    "gpu",
    "type",
    stored_as="scalars:gpu_ecc_errors_total",
)
GPU_REMAPPED_ROWS = gauge(
    "rankscope_gpu_remapped_rows",
    "Rows of memory that were replaced, by cause; 1 where one is pending or failed.",
    "gpu",
    "state",
    stored_as="scalars:gpu_remapped_rows",
)
GPU_PCIE_BYTES_PER_SECOND = gauge(
    "rankscope_gpu_pcie_bytes_per_second",
    "Bytes per second over PCIe, sent or received by the GPU.",
    "gpu",
    "direction",
    stored_as="scalars:gpu_pcie_bytes_per_second",
)
GPU_PCIE_REPLAYS = counter(
    "rankscope_gpu_pcie_replays_total",
    "Packets that PCIe had to send again.",
    "gpu",
    stored_as="scalars:gpu_pcie_replays_total",
)
GPU_NVLINK_BYTES = counter(
    "rankscope_gpu_nvlink_bytes_total",
    "Bytes over all NVLinks, sent or received by the GPU.",
    "gpu",
    "direction",
    unit="bytes",
    stored_as="scalars:gpu_nvlink_bytes_total",
)
GPU_XID_ERRORS = counter(
    "rankscope_gpu_xid_errors_total",
    "Critical errors (XID) that the driver has reported while this rank was watched; 0 from the start.",
    "gpu",
    stored_as="scalars:gpu_xid_errors_total",
)
PROCESS_CPU_SECONDS = counter(
    "rankscope_process_cpu_seconds_total",
    "CPU time of the training process, all threads.",
    unit="seconds",
    stored_as="scalars:process_cpu_seconds_total",
)
PROCESS_THREADS = gauge(
    "rankscope_process_threads", "Threads of the training process.", stored_as="scalars:process_threads"
)
PROCESS_MAJOR_FAULTS = counter(
    "rankscope_process_major_faults_total",
    "Page faults of the process that had to read from disk.",
    stored_as="scalars:process_major_faults_total",
)
PROCESS_INVOLUNTARY_SWITCHES = counter(
    "rankscope_process_involuntary_switches_total",
    "Times that the process had to give its processor to another: more than it has threads for.",
    stored_as="scalars:process_involuntary_switches_total",
)
PROCESS_READ_BYTES = counter(
    "rankscope_process_read_bytes_total",
    "Bytes the process has read from storage.",
    unit="bytes",
    stored_as="scalars:process_read_bytes_total",
)
PROCESS_WRITTEN_BYTES = counter(
    "rankscope_process_written_bytes_total",
    "Bytes the process has written to storage.",
    unit="bytes",
    stored_as="scalars:process_written_bytes_total",
)
HOST_CPU_UTILIZATION = gauge(
    "rankscope_host_cpu_utilization_ratio",
    "Share of the time of all processors of the host that was spent since the look before.",
    stored_as="scalars:host_cpu_utilization",
)
HOST_MEMORY_AVAILABLE_BYTES = gauge(
    "rankscope_host_memory_available_bytes",
    "Memory of the host that processes can still have.",
    unit="bytes",
    stored_as="scalars:host_memory_available_bytes",
)
HOST_MEMORY_TOTAL_BYTES = gauge(
    "rankscope_host_memory_total_bytes",
    "Memory of the host.",
    unit="bytes",
    stored_as="scalars:host_memory_total_bytes",
)
HOST_SWAP_USED_BYTES = gauge(
    "rankscope_host_swap_used_bytes",
    "Memory of the host that lies on disk.",
    unit="bytes",
    stored_as="scalars:host_swap_used_bytes",
)
