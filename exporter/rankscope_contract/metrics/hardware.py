"""Metrics of the hardware that a rank uses: device memory, throughput, GPU, process and host."""

from __future__ import annotations

from typing import Final

from rankscope_contract.metrics.spec import gauge, logged_counter, logged_gauge

RESIDENT_BYTES = gauge(
    "rankscope_process_resident_memory_bytes",
    "Resident memory of the training process.",
    stored_as="scalars:resident_memory_bytes",
)
DEVICE_ALLOCATED_BYTES = logged_gauge("rankscope_device_memory_allocated_bytes", "Device memory that tensors occupy.")
DEVICE_RESERVED_BYTES = logged_gauge(
    "rankscope_device_memory_reserved_bytes", "Device memory that torch's allocator has reserved."
)
DEVICE_ALLOCATED_PEAK_BYTES = logged_gauge(
    "rankscope_device_memory_allocated_peak_bytes",
    "Maximum device memory of tensors since process start, or since the script reset torch's peak statistics.",
)
DEVICE_RESERVED_PEAK_BYTES = logged_gauge(
    "rankscope_device_memory_reserved_peak_bytes",
    "Maximum device memory reserved by torch's allocator since process start, or since the script reset the peak.",
)
DEVICE_ALLOC_RETRIES = logged_counter(
    "rankscope_device_memory_alloc_retries_total",
    "Allocations that succeeded only after torch had freed its cached memory. Each retry blocks training.",
)
DEVICE_OOMS = logged_counter(
    "rankscope_device_memory_ooms_total",
    "Allocations that failed because device memory was exhausted, including errors that the script caught.",
)
TFLOPS_PER_GPU = logged_gauge(
    "rankscope_tflops_per_gpu",
    "Model TFLOP/s of this rank's device in the latest step. Label method: source of the FLOP count.",
    "method",
)
MFU = logged_gauge(
    "rankscope_mfu_ratio",
    "Model FLOP/s utilization: model FLOP/s divided by the peak of the device. Recomputed operations do not count. "
    "Absent if the peak is unknown.",
    "method",
)
GPU_UTILIZATION = logged_gauge(
    "rankscope_gpu_utilization_ratio", "Share of the driver's last sample period in which a kernel was running.", "gpu"
)
GPU_MEMORY_UTILIZATION = logged_gauge(
    "rankscope_gpu_memory_utilization_ratio",
    "Share of the driver's last sample period in which device memory was read or written.",
    "gpu",
)
GPU_MEMORY_USED_BYTES = logged_gauge("rankscope_gpu_memory_used_bytes", "Device memory in use by all processes.", "gpu")
GPU_MEMORY_TOTAL_BYTES = logged_gauge("rankscope_gpu_memory_total_bytes", "Total device memory.", "gpu")
GPU_POWER_WATTS = logged_gauge("rankscope_gpu_power_watts", "Power consumption of the GPU board.", "gpu")
GPU_POWER_LIMIT_WATTS = logged_gauge("rankscope_gpu_power_limit_watts", "Power limit of the GPU board.", "gpu")
GPU_ENERGY_JOULES = logged_counter(
    "rankscope_gpu_energy_joules_total", "Energy that the GPU board has consumed since its driver was loaded.", "gpu"
)
GPU_TEMPERATURE_CELSIUS = logged_gauge(
    "rankscope_gpu_temperature_celsius", "Temperature by sensor: gpu or memory.", "gpu sensor"
)
GPU_CLOCK_HERTZ = logged_gauge(
    "rankscope_gpu_clock_hertz", "Clock rate of the GPU's multiprocessors (sm) or of its memory.", "gpu clock"
)
GPU_CLOCK_LIMIT_HERTZ = logged_gauge(
    "rankscope_gpu_clock_limit_hertz",
    "Maximum clock rate of the GPU's multiprocessors (sm) or of its memory.",
    "gpu clock",
)
GPU_THROTTLED = logged_gauge(
    "rankscope_gpu_throttled",
    "1 for each reason for which the GPU currently reduces its clock rates, 0 for all other reasons.",
    "gpu reason",
)
BAD_THROTTLE_REASONS: Final = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")
"""Throttling reasons that do not occur under normal full load at the power limit of a GPU."""
THROTTLED_SECONDS: Final = 300
"""Time in seconds for which a GPU must be throttled for a bad reason before this is reported."""

GPU_ECC_ERRORS = logged_counter(
    "rankscope_gpu_ecc_errors_total",
    "ECC errors of GPU memory since the driver was loaded, by type: corrected or uncorrected.",
    "gpu type",
)
GPU_REMAPPED_ROWS = logged_gauge(
    "rankscope_gpu_remapped_rows",
    "Remapped rows of GPU memory, by cause. For the states pending and failed: 1 if there is such a row, else 0.",
    "gpu state",
)
GPU_PCIE_BYTES_PER_SECOND = logged_gauge(
    "rankscope_gpu_pcie_bytes_per_second", "Bytes per second that the GPU sends or receives over PCIe.", "gpu direction"
)
GPU_PCIE_REPLAYS = logged_counter("rankscope_gpu_pcie_replays_total", "Retransmitted PCIe packets.", "gpu")
GPU_NVLINK_BYTES = logged_counter(
    "rankscope_gpu_nvlink_bytes_total", "Bytes that the GPU has sent or received over all NVLinks.", "gpu direction"
)
GPU_XID_ERRORS = logged_counter(
    "rankscope_gpu_xid_errors_total",
    "Critical GPU errors (XID) that the driver has reported since the monitor started. Starts at 0.",
    "gpu",
)
PROCESS_CPU_SECONDS = logged_counter(
    "rankscope_process_cpu_seconds_total", "CPU time of the training process, all threads."
)
PROCESS_THREADS = logged_gauge("rankscope_process_threads", "Threads of the training process.")
PROCESS_MAJOR_FAULTS = logged_counter(
    "rankscope_process_major_faults_total", "Page faults of the training process that required a read from disk."
)
PROCESS_INVOLUNTARY_SWITCHES = logged_counter(
    "rankscope_process_involuntary_switches_total",
    "Involuntary context switches of the training process. A high rate: more runnable threads than CPU cores.",
)
PROCESS_READ_BYTES = logged_counter(
    "rankscope_process_read_bytes_total", "Bytes that the training process has read from storage."
)
PROCESS_WRITTEN_BYTES = logged_counter(
    "rankscope_process_written_bytes_total", "Bytes that the training process has written to storage."
)
HOST_CPU_UTILIZATION = logged_gauge(
    "rankscope_host_cpu_utilization_ratio", "Busy share of all CPU cores of the host since the previous reading."
)
HOST_MEMORY_AVAILABLE_BYTES = logged_gauge(
    "rankscope_host_memory_available_bytes", "Host memory that processes can still allocate."
)
HOST_MEMORY_TOTAL_BYTES = logged_gauge("rankscope_host_memory_total_bytes", "Total host memory.")
HOST_SWAP_USED_BYTES = logged_gauge("rankscope_host_swap_used_bytes", "Host memory swapped out to disk.")
