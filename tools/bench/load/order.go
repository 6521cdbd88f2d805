package load

import (
	"net/netip"
	"time"
)

// What an end can be told to do.
const (
	udpSender      = "udp sender"
	udpReceiver    = "udp receiver"
	streamSender   = "stream sender"
	streamReceiver = "stream receiver"
	requester      = "requester"
	responder      = "responder"
	connector      = "connector"
	acceptor       = "acceptor"
	flowOpener     = "flow opener"
	flowAnswerer   = "flow answerer"
	flowHolder     = "flow holder"
)

const (
	// sharedMemory is the file descriptor of what both ends of a sample have in common.
	sharedMemory = 3
	// Servers choose ports from firstPort to lastPort, below those that kernels give to clients.
	firstPort = 10000
	lastPort  = 30000

	// patience is for a peer that should answer at once, longNap for loops that look whether they are to end.
	patience     = 5 * time.Second
	longNap      = 10 * time.Millisecond
	helloTries   = 10
	helloTimeout = 200 * time.Millisecond

	// minSize of a datagram's payload: a hello is shorter. With maxSize it is still one packet on an Ethernet.
	minSize = 16
	maxSize = 1472

	requestSize     = 64
	streamChunk     = 128 << 10 // as iperf3
	minTransactions = 1000      // for a p99.9 to exist

	// udpBatch datagrams go into one system call, udpWindow at most are between sender and receiver: fewer than the 1000 packets that
	// the kernel lets wait for a CPU (net.core.netdev_max_backlog), so that no queue on the way can be full.
	udpBatch  = 64
	udpWindow = 960
	// The receiver's nap is a tenth of the time in which the window fills on a fast machine.
	udpReceiverNap = 100 * time.Microsecond
	udpSenderNap   = 50 * time.Microsecond
	// udpGiveUp is how long the receiver must see nothing for what is missing to be lost: many naps.
	udpGiveUp = 2 * time.Millisecond

	// One flow takes one port at each end: this many ports of the server's keep the number of NAT ports that a sample takes from one
	// destination, 16 384 at most, in the hundreds.
	connectPorts    = 64
	connectAtOnce   = 16
	flowPorts       = 16
	flowSocketsAway = 16 // sockets whose datagrams are on their way at a time
)

// message is what an end is told, a line of JSON each.
type message struct {
	Order   *order  `json:",omitempty"` // the first
	Window  *window `json:",omitempty"`
	Refresh bool    `json:",omitempty"`
	Stop    bool    `json:",omitempty"`
}

// order is all that an end has to know before it gets ready.
type order struct {
	Work    string
	Netns   string
	CPU     int
	Address netip.Addr
	Port    int // the first of Ports; a server chooses and tells
	Ports   int
	Size    int // of a datagram's payload
	Count   int // of connections or flows
}

// window says when a sample begins and ends, in ns of CLOCK_MONOTONIC, which is the same in all processes.
type window struct{ Start, Begin, End int64 }

// report is what an end says: once when it is ready, and once at the end. A holder of flows does so after each use.
type report struct {
	Error       string `json:",omitempty"`
	NotMeasured bool   `json:",omitempty"` // the error is one of the sample, not of the set-up

	Port int `json:",omitempty"`

	Total     uint64        `json:",omitempty"` // all that was done, warm-up included
	Counted   uint64        `json:",omitempty"` // of that, inside the window
	Each      []uint64      `json:",omitempty"` // Counted, by connection
	Lost      uint64        `json:",omitempty"`
	Overflow  uint64        `json:",omitempty"`
	Resent    uint64        `json:",omitempty"`
	Live      int           `json:",omitempty"`
	Paused    time.Duration `json:",omitempty"`
	Histogram *Histogram    `json:",omitempty"`

	Measured time.Duration `json:",omitempty"` // how long the window was
	CPUs     []CPU         `json:",omitempty"`
	Process  Process
}
