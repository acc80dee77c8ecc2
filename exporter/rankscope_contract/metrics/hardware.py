"""Metrics of the hardware that a rank uses: device memory, throughput, GPU, process and host."""

from __future__ import annotations

from rankscope_contract.metrics.spec import counter, gauge

RESIDENT_BYTES = gauge(
    "rankscope_process_resident_memory_bytes",
    "Resident memory of the training process.",
    scalar="resident_memory_bytes",
)
DEVICE_ALLOCATED_BYTES = gauge(
    "rankscope_device_memory_allocated_bytes",
    "Device memory that tensors occupy.",
    scalar="device_memory_allocated_bytes",
)
DEVICE_RESERVED_BYTES = gauge(
    "rankscope_device_memory_reserved_bytes",
    "Device memory that torch's allocator has reserved.",
    scalar="device_memory_reserved_bytes",
)
DEVICE_ALLOCATED_PEAK_BYTES = gauge(
    "rankscope_device_memory_allocated_peak_bytes",
    "Maximum device memory of tensors since process start, or since the script reset torch's peak statistics.",
    scalar="device_memory_allocated_peak_bytes",
)
DEVICE_RESERVED_PEAK_BYTES = gauge(
    "rankscope_device_memory_reserved_peak_bytes",
    "Maximum device memory reserved by torch's allocator since process start, or since the script reset the peak.",
    scalar="device_memory_reserved_peak_bytes",
)
DEVICE_ALLOC_RETRIES = counter(
    "rankscope_device_memory_alloc_retries_total",
    "Allocations that succeeded only after torch had freed its cached memory. Each retry blocks training.",
    scalar="device_memory_alloc_retries_total",
)
DEVICE_OOMS = counter(
    "rankscope_device_memory_ooms_total",
    "Allocations that failed because device memory was exhausted, including errors that the script caught.",
    scalar="device_memory_ooms_total",
)
TFLOPS_PER_GPU = gauge(
    "rankscope_tflops_per_gpu",
    "Model TFLOP/s of this rank's device in the latest step. Label method: source of the FLOP count.",
    "method",
    scalar="tflops_per_gpu",
)
MFU = gauge(
    "rankscope_mfu_ratio",
    "Model FLOP/s utilization: model FLOP/s divided by the peak of the device. Recomputed operations do not count. "
    "Absent if the peak is unknown.",
    "method",
    scalar="mfu",
)
GPU_UTILIZATION = gauge(
    "rankscope_gpu_utilization_ratio",
    "Share of the driver's last sample period in which a kernel was running.",
    "gpu",
    scalar="gpu_utilization",
)
GPU_MEMORY_UTILIZATION = gauge(
    "rankscope_gpu_memory_utilization_ratio",
    "Share of the driver's last sample period in which device memory was read or written.",
    "gpu",
    scalar="gpu_memory_utilization",
)
GPU_MEMORY_USED_BYTES = gauge(
    "rankscope_gpu_memory_used_bytes", "Device memory in use by all processes.", "gpu", scalar="gpu_memory_used_bytes"
)
GPU_MEMORY_TOTAL_BYTES = gauge(
    "rankscope_gpu_memory_total_bytes", "Total device memory.", "gpu", scalar="gpu_memory_total_bytes"
)
GPU_POWER_WATTS = gauge(
    "rankscope_gpu_power_watts", "Power consumption of the GPU board.", "gpu", scalar="gpu_power_watts"
)
GPU_POWER_LIMIT_WATTS = gauge(
    "rankscope_gpu_power_limit_watts", "Power limit of the GPU board.", "gpu", scalar="gpu_power_limit_watts"
)
GPU_ENERGY_JOULES = counter(
    "rankscope_gpu_energy_joules_total",
    "Energy that the GPU board has consumed since its driver was loaded.",
    "gpu",
    scalar="gpu_energy_joules_total",
)
GPU_TEMPERATURE_CELSIUS = gauge(
    "rankscope_gpu_temperature_celsius",
    "Temperature by sensor: gpu or memory.",
    "gpu sensor",
    scalar="gpu_temperature_celsius",
)
GPU_CLOCK_HERTZ = gauge(
    "rankscope_gpu_clock_hertz",
    "Clock rate of the GPU's multiprocessors (sm) or of its memory.",
    "gpu clock",
    scalar="gpu_clock_hertz",
)
GPU_CLOCK_LIMIT_HERTZ = gauge(
    "rankscope_gpu_clock_limit_hertz",
    "Maximum clock rate of the GPU's multiprocessors (sm) or of its memory.",
    "gpu clock",
    scalar="gpu_clock_limit_hertz",
)
GPU_THROTTLED = gauge(
    "rankscope_gpu_throttled",
    "1 for each reason for which the GPU currently reduces its clock rates, 0 for all other reasons.",
    "gpu reason",
    scalar="gpu_throttled",
)
GPU_ECC_ERRORS = counter(
    "rankscope_gpu_ecc_errors_total",
    "ECC errors of GPU memory since the driver was loaded, by type: corrected or uncorrected.",
    "gpu type",
    scalar="gpu_ecc_errors_total",
)
GPU_REMAPPED_ROWS = gauge(
    "rankscope_gpu_remapped_rows",
    "Remapped rows of GPU memory, by cause. For the states pending and failed: 1 if there is such a row, else 0.",
    "gpu state",
    scalar="gpu_remapped_rows",
)
GPU_PCIE_BYTES_PER_SECOND = gauge(
    "rankscope_gpu_pcie_bytes_per_second",
    "Bytes per second that the GPU sends or receives over PCIe.",
    "gpu direction",
    scalar="gpu_pcie_bytes_per_second",
)
GPU_PCIE_REPLAYS = counter(
    "rankscope_gpu_pcie_replays_total", "Retransmitted PCIe packets.", "gpu", scalar="gpu_pcie_replays_total"
)
GPU_NVLINK_BYTES = counter(
    "rankscope_gpu_nvlink_bytes_total",
    "Bytes that the GPU has sent or received over all NVLinks.",
    "gpu direction",
    scalar="gpu_nvlink_bytes_total",
)
GPU_XID_ERRORS = counter(
    "rankscope_gpu_xid_errors_total",
    "Critical GPU errors (XID) that the driver has reported since the monitor started. Starts at 0.",
    "gpu",
    scalar="gpu_xid_errors_total",
)
PROCESS_CPU_SECONDS = counter(
    "rankscope_process_cpu_seconds_total",
    "CPU time of the training process, all threads.",
    scalar="process_cpu_seconds_total",
)
PROCESS_THREADS = gauge("rankscope_process_threads", "Threads of the training process.", scalar="process_threads")
PROCESS_MAJOR_FAULTS = counter(
    "rankscope_process_major_faults_total",
    "Page faults of the training process that required a read from disk.",
    scalar="process_major_faults_total",
)
PROCESS_INVOLUNTARY_SWITCHES = counter(
    "rankscope_process_involuntary_switches_total",
    "Involuntary context switches of the training process. A high rate: more runnable threads than CPU cores.",
    scalar="process_involuntary_switches_total",
)
PROCESS_READ_BYTES = counter(
    "rankscope_process_read_bytes_total",
    "Bytes that the training process has read from storage.",
    scalar="process_read_bytes_total",
)
PROCESS_WRITTEN_BYTES = counter(
    "rankscope_process_written_bytes_total",
    "Bytes that the training process has written to storage.",
    scalar="process_written_bytes_total",
)
HOST_CPU_UTILIZATION = gauge(
    "rankscope_host_cpu_utilization_ratio",
    "Busy share of all CPU cores of the host since the previous reading.",
    scalar="host_cpu_utilization",
)
HOST_MEMORY_AVAILABLE_BYTES = gauge(
    "rankscope_host_memory_available_bytes",
    "Host memory that processes can still allocate.",
    scalar="host_memory_available_bytes",
)
HOST_MEMORY_TOTAL_BYTES = gauge(
    "rankscope_host_memory_total_bytes", "Total host memory.", scalar="host_memory_total_bytes"
)
HOST_SWAP_USED_BYTES = gauge(
    "rankscope_host_swap_used_bytes", "Host memory swapped out to disk.", scalar="host_swap_used_bytes"
)
