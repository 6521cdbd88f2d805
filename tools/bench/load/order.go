package load

import (
	"net/netip"
	"time"
)

// What an end can be told to do.
const (
	udpSender       = "udp sender"
	udpReceiver     = "udp receiver"
	streamSender    = "stream sender"
	streamReceiver  = "stream receiver"
	requester       = "requester"
	responder       = "responder"
	connector       = "connector"
	acceptor        = "acceptor"
	flowOpener      = "flow opener"
	flowAnswerer    = "flow answerer"
	flowHolder      = "flow holder"
	sharedMemory    = 3 // the file descriptor of what both ends of a sample have in common
	firstPort       = 10000
	lastPort        = 30000 // below what kernels give to clients
	helloTries      = 10
	helloTimeout    = 200 * time.Millisecond
	patience        = 5 * time.Second // for a peer that should answer at once
	longNap         = 10 * time.Millisecond
	requestSize     = 64
	streamChunk     = 128 << 10
	udpBatch        = 64
	udpWindow       = 1024
	udpReceiverNap  = 100 * time.Microsecond
	udpSenderNap    = 50 * time.Microsecond
	connectPorts    = 64
	connectAtOnce   = 16
	flowPorts       = 16
	minSize         = 16 // a hello is shorter
	maxSize         = 65507 - 1
	minTransactions = 100
	flowSocketsAway = 16 // how many sockets' datagrams are on their way at a time
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

// report is what an end says: once when it is ready, and once at the end (a holder of flows after each refresh).
type report struct {
	Error       string `json:",omitempty"`
	NotMeasured bool   `json:",omitempty"` // the error is one of the sample, not of the set-up

	Port int `json:",omitempty"`

	Total      uint64     `json:",omitempty"` // all that was done, warm-up included
	Counted    uint64     `json:",omitempty"` // inside the window
	Lost       uint64     `json:",omitempty"`
	Overflow   uint64     `json:",omitempty"`
	Resent     uint64     `json:",omitempty"`
	Each       []uint64   `json:",omitempty"` // Counted, by connection
	Paused     int64      `json:",omitempty"`
	Histogram  *Histogram `json:",omitempty"`
	Measured   time.Duration
	CPUs       []CPU `json:",omitempty"`
	Process    Process
	OfAllFlows int `json:",omitempty"`
}
