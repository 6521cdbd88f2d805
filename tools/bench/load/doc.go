// Package load generates the benchmark's traffic between two network namespaces and measures what arrives, and what CPU time went
// by meanwhile. It knows nothing of the network in between: whether the packets took the way that they were to take is for the
// caller to prove, by the dataplane's own counters.
//
//	target := load.Target{Client: a, Server: b, ServerCPU: 1, Duration: time.Second, Warmup: 200 * time.Millisecond}
//	result, err := load.UDP(ctx, target, 64)
//
// # Ends
//
// Each end is a thread in its namespace, pinned to its CPU. Its loop calls the kernel directly, without Go's scheduler, and the garbage
// collector is off meanwhile. A path is tried before a sample starts, so that no sample measures how neighbours are resolved.
//
// # Window
//
// The client goes by the clock and says when the window opens and closes, and the server follows. Both read /proc/stat and getrusage at these two moments,
// between two turns of their loops. A rate is what was counted, divided by the time that really passed at the end that counts.
// The kernel counts /proc/stat in ticks of 10 ms: its shares are good when summed over seconds.
// The CPU time of an end is precise, and includes the softirqs that its own sending raised, which on a veth pair is
// the whole path to the other end's socket.
//
// # UDP
//
// A connected socket sends 64 datagrams per sendmmsg, without GSO, each a packet of its own from there on; recvmmsg takes as many. What
// counts is what the receiver took. The receiver never sleeps in recvmmsg: with a sleeping receiver each packet pays for waking it,
// which all modes would share and which would hide what they differ in. It takes what is there and naps for 100 us.
// The sender is paced by the receiver, which says in shared memory how many it has taken: the sender naps when 960 are on their way, fewer
// than any queue of the kernel has room for. So a sample measures forwarding, and never how fast datagrams are thrown away at a full socket.
//
// # Loss
//
// Since the generators overrun no queue, what is lost on the way the network has lost. More than one datagram lost in a thousand, or one
// new flow in a thousand without its answer, refuses the sample (ErrNotMeasured): a network that throws packets away is not fast. TCP hides
// its losses: segments sent again are counted, and refuse a sample of connections likewise.
//
// # Disturbance
//
// A sample is refused with ErrStarved when an end was ready to run and waited for its CPU for more than a twentieth of the window, or when
// the hypervisor took more than a fiftieth.
//
// # TCP
//
// Streams send blocks of 128 KiB, as iperf3 writes them, on default sockets. A request is 64 bytes on a connection with TCP_NODELAY, between
// ends that sleep until something comes, as programs do: latency includes two wake-ups. Connections are opened sixteen at a time, so that a CPU is
// the limit and not a wake-up. The server answers and closes; the client reads to the end, and then closes with SO_LINGER of no time. That RST
// in place of the second FIN leaves no TIME_WAIT at either end, and connection tracking forgets the flow in 10 s rather than 120.
//
// # New flows
//
// 2048 sockets of the client's send to each of 16 ports of the server's, each datagram another 5-tuple; the server's ports are other ones in the
// next sample. 256 flows are under way at a time, and each is answered, so both directions of the translation are measured.
package load
