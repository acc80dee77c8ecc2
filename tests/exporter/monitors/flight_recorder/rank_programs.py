"""Programs that fork two ranks on gloo, which log a line before and after each call, and kill them by process id."""

RANKS = """
import json, os, signal, sys, time, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
FOLDER = os.environ["FOLDER"]

def path(name):
    return os.path.join(FOLDER, name)

def wait_for(condition, seconds=80):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("waited too long")
        time.sleep(0.01)

def send_message(name, value=""):
    with open(path(name + ".part"), "w") as file:
        file.write(value)
    os.rename(path(name + ".part"), path(name))

def wait_for_message(name):
    wait_for(lambda: os.path.exists(path(name)))

def log_call(rank, *words):
    with open(path(f"diary-{rank}"), "a") as file:
        file.write(json.dumps([*words, time.time_ns() // 1000]) + "\\n")

def join(rank):
    dist.init_process_group("gloo", init_method=f"file://{path('store')}", rank=rank, world_size=2)

def run_ranks(work, conduct=lambda pids: None):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                work(rank)
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
                code = 1
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    try:
        conduct(pids)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print("exit codes", codes)
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
"""

LATE = (1, 2, "all_gather")
"""Which rank comes late to which call of which step."""
LATE_SECONDS = 0.5

TRAINING = (
    RANKS
    + f"""
LATE, LATE_SECONDS = {LATE}, {LATE_SECONDS}
"""
    + """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.debug import CommDebugMode
import rankscope

def monitored(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = rankscope.MonitorConfig(console=False, exit_wait_seconds=0, collectives_share=1.0, statistics="torch")
    return rankscope.Monitor(config).attach(net, optimizer), optimizer

def left(monitor, session):
    wait_for(session.collectives.totals)
    page = b"".join(bytes(piece) for piece in session.channel.exposition.pieces()).decode()
    monitor.detach()
    records = session.channel.ring.after(-1, 1 << 40).records
    return {
        "rows": [row for record in records for row in record.collectives],
        "faults": monitor.faults,
        "overwritten": session.collectives.overwritten,
        "page": [line for line in page.splitlines() if line.startswith("rankscope_collective_")],
    }

def own_calls(rank, step):
    half = torch.ones(2 * step, dtype=torch.bfloat16)
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),  # all_reduce is here
        "all_gather": lambda: dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.ones(4)),  # all_gather is here
        "broadcast": lambda: dist.broadcast(half, 0),  # broadcast is here
        "barrier": lambda: dist.barrier(),  # barrier is here
    }.items():
        if (rank, step, name) == LATE:
            wait_for_message("the other is about to enter")
            time.sleep(LATE_SECONDS)
        elif (step, name) == LATE[1:]:
            send_message("the other is about to enter")
        log_call(rank, "enter", step, name)
        call()
        log_call(rank, "leave", step, name)

def script(rank):
    net = torch.nn.Linear(4, 2)
    monitor, optimizer = monitored(net)
    session = monitor._session
    for step in (1, 2, 3):
        net(torch.ones(2, 4)).sum().backward()
        own_calls(rank, step)
        optimizer.step(); optimizer.zero_grad()
    return left(monitor, session)

def sharded():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for part in net:
        fully_shard(part)
    return fully_shard(net)

def parallel():
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

def wrapped(make):
    torch.manual_seed(0)
    net = make()
    monitor, optimizer = monitored(net)
    session = monitor._session
    counted = []
    for step in (1, 2, 3):
        with CommDebugMode() as counting:
            net(torch.ones(2, 8)).sum().backward()  # backward is here
        counted.append({str(op): count for op, count in counting.get_comm_counts().items()})
        optimizer.step(); optimizer.zero_grad()
    return {**left(monitor, session), "counted": counted}

def work(rank):
    join(rank)
    outcome = {"script": script(rank)}
    outcome["DDP"] = wrapped(lambda: DistributedDataParallel(torch.nn.Linear(8, 8)))
    outcome["FSDP1"] = wrapped(
        lambda: FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=True)
    )
    outcome["FSDP2"] = wrapped(sharded)
    outcome["tensor parallelism"] = wrapped(parallel)
    dist.destroy_process_group()
    outcome["told_at"] = time.time_ns() // 1000
    send_message(f"outcome-{rank}", json.dumps(outcome))

run_ranks(work)
"""
)

STANDING = (
    RANKS
    + """
from rankscope_exporter.monitors.flight_recorder.poller import take_flight_record

def unexpected(where, error):
    raise error

def enter(rank, case, call):
    log_call(rank, "enter", case)
    return call()

def leave(rank, case, works):
    for work in works:
        work.wait()
    log_call(rank, "leave", case)

def tell(rank, case, is_as_wanted=lambda record: True):
    # A thread of gloo retires an entry shortly after the call has returned.
    wait_for(lambda: is_as_wanted(take_flight_record(case, unexpected)))
    record = take_flight_record(case, unexpected)
    log_call(rank, "tell", case)
    send_message(f"{case}-{rank}", record.to_json())

def pending(record):
    return [entry.is_pending for entry in record.collectives].count(True) == 1 and record.latest.is_pending

def stop(until):
    # As often as it is woken: the root of a broadcast leaves once gloo's own thread over there has asked for the data,
    # which it may not have done yet when its rank is stopped.
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)
        if os.path.exists(path(until)):
            break

CASES = {
    "never left": lambda: dist.broadcast(torch.ones(3), 0, async_op=True),
    "all in": lambda: dist.all_reduce(torch.ones(1000), async_op=True),
    "mismatch": None,
}

def first(rank):
    join(rank)
    case = "never entered"
    dist.barrier()
    work = enter(rank, case, lambda: dist.all_reduce(torch.ones(5), async_op=True))
    tell(rank, case, pending)
    wait_for_message(f"{case}-1")
    leave(rank, case, [work])
    for case, call in CASES.items():
        wait_for_message(f"{case} stopped")
        if case == "mismatch":
            call = lambda: dist.all_reduce(torch.ones(4), async_op=True)
        work = enter(rank, case, call)
        if case == "never left":
            leave(rank, case, [work])
        tell(rank, case, pending if case != "never left" else lambda record: record.pending is None)
        send_message(f"{case} done")
        if case == "all in":
            leave(rank, case, [work])

def second(rank):
    join(rank)
    case = "never entered"
    dist.barrier()
    wait_for_message(f"{case}-0")
    tell(rank, case, lambda record: record.pending is None)
    leave(rank, "late", [enter(rank, "late", lambda: dist.all_reduce(torch.ones(5), async_op=True))])
    for case, call in CASES.items():
        if case == "mismatch":
            call = lambda: dist.broadcast(torch.ones(8, dtype=torch.float64), 0, async_op=True)
        work = enter(rank, case, call)
        tell(rank, case, pending)
        stop(f"{case} over")
        leave(rank, case, [work])

def conduct(pids):
    for case in CASES:
        os.waitpid(pids[1], os.WUNTRACED)
        send_message(f"{case} stopped")
        while case == "never left" and not os.path.exists(path(f"{case} done")):
            time.sleep(0.1)
            os.kill(pids[1], signal.SIGCONT)
            os.waitpid(pids[1], os.WUNTRACED)
        wait_for_message(f"{case} done")
        send_message(f"{case} over")
        if case == "mismatch":
            os.kill(pids[1], signal.SIGKILL)
        else:
            os.kill(pids[1], signal.SIGCONT)

run_ranks(lambda rank: (first, second)[rank](rank), conduct)
"""
)
