// Package load generates the benchmark's traffic between two network namespaces and measures what arrives, and what CPU time went
// by meanwhile. It knows nothing of the network in between: whether the packets took the way that they were to take is for the
// caller to prove, by the dataplane's own counters.
//
//	target := load.Target{Client: "/run/netns/a", Server: "/run/netns/b", Address: b, ServerCPU: 1,
//		Duration: time.Second, Warmup: 200 * time.Millisecond}
//	result, err := load.UDP(ctx, target, 64)
//
// # Ends
//
// Each end is a process: the caller's executable, run again with WorkerCommand as its first argument. One locked thread enters the
// namespace, is pinned to its CPU, and runs the loop; Go's garbage collector and preemption are off, and the loop calls
// the kernel directly. A process, unlike a thread, has CPU times of its own, ends at once when the context does, and dies with a
// parent that was killed. A path is tried before a sample starts, so that no sample measures how neighbours are resolved.
//
// # Window
//
// Both ends know from when to when a sample is measured. Whoever counts reads /proc/stat at the same two moments, between two turns of its
// loop; both ends read getrusage then. A rate is what was counted, divided by the time that really passed.
// The kernel counts /proc/stat in ticks of 10 ms: shares of user, system and softirq are good when summed over seconds.
// The CPU time of an end is precise, and includes the softirqs that its own sending raised, which on a veth pair is
// the whole path to the other end's socket.
//
// # UDP
//
// A connected socket sends 64 datagrams per sendmmsg, without GSO, each a packet of its own from there on; recvmmsg takes as many. What
// counts is what the receiver took. The receiver never sleeps in recvmmsg: with a sleeping receiver each packet pays for waking it,
// which all modes would share and which would hide what they differ in. It takes what is there and naps for 100 us.
// The sender is paced by the receiver: both share a page of memory, in which the receiver says how many it has taken, and the
// sender naps when 960 are on their way, fewer than any queue of the kernel has room for. So a sample measures forwarding, and never how
// fast datagrams are thrown away at a full socket; no packet that says so loads the reverse path; and a sender that is slower than the
// receiver, which is what one sees when the path runs on the sender's CPU, never waits. UDPResult.Paused says how long it did.
//
// # Loss
//
// Since the generators overrun no queue, what is lost on the way the network has lost. The figure is what arrived, and more than one datagram
// lost in a thousand, or one new flow in a thousand without its answer, refuses the sample (ErrNotMeasured): a network that throws packets away
// is not fast. TCP hides its losses: segments sent again are counted, and refuse a sample of connections likewise.
//
// # Disturbance
//
// A sample is refused with ErrStarved when an end was ready to run and waited for its CPU for more than a twentieth of the window, or when
// the hypervisor took more than a fiftieth. Usage.Delayed is there to be recorded with what passes.
//
// # TCP stream
//
// Blocks of 128 KiB, as iperf3 writes them, on default sockets. Not iperf3 itself: its interval is not ours, so neither bytes nor CPU times
// would be of the same window; its server has to be started and waited for per sample; its control connection runs through the network
// under test; and it would be one more thing to install. The two agree: on 2026-11-21, two CPUs, Linux 6.18, over one bare veth pair and with
// ends pinned alike, iperf3 3.12 moved 37 to 43 Gbit/s in ten runs of two seconds, and this stream 43 to 44 in five. For datagrams of 64 bytes iperf3
// measures its own system calls, one per datagram.
//
// # Request and response
//
// One connection with TCP_NODELAY, 64 bytes each way, ends that sleep until something comes, as programs do: latency includes two
// wake-ups. Durations go into a Histogram.
//
// # Connections
//
// Sixteen at a time, so that a CPU is the limit and not a wake-up; the wake-up is in the latency already. The server answers and
// closes; the client reads to the end, and then closes with SO_LINGER of no time. That RST in place of the second FIN leaves no TIME_WAIT at either
// end, and connection tracking of any kind forgets the flow in 10 s rather than 120: a second sample finds the tables as the first one
// did, and no ports run out. 64 ports of the server take turns.
//
// # New flows
//
// 2048 sockets of the client's send to each of 16 ports of the server's, each datagram another 5-tuple; the server's ports are other ones in the
// next sample. 256 flows are under way at a time, and each is answered, so both directions of the translation are measured. A sample
// ends after FlowsPerSample, which takes a tenth of a second or two: CPU times of such a sample are to be had from its ends.
//
// # Limits
//
// What the generators cost by themselves is in the mode direct, where nothing is between the two ends but a veth pair.
package load
