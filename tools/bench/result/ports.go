package result

import "time"

// Close is how a short connection ends.
type Close string

// The ways of closing. Question is a datagram and its answer, on a socket of its own.
const (
	ResetByClient Close = "rst-client"
	ResetByServer Close = "rst-server"
	FinByClient   Close = "fin-client"
	FinByServer   Close = "fin-server"
	Question      Close = "udp"
)

// Closes are all of them.
func Closes() []Close {
	return []Close{ResetByClient, ResetByServer, FinByClient, FinByServer, Question}
}

// said is how a table says it.
func (c Close) said() string {
	return map[Close]string{
		ResetByClient: "connections closed by RST from the client", ResetByServer: "connections closed by RST from the server",
		FinByClient: "connections closed by FIN, the client first", FinByServer: "connections closed by FIN, the server first", Question: "UDP questions, a socket each",
	}[c]
}

// ManyPods is how many pods open short connections together.
const ManyPods = 10

// The workloads of ports that masquerading takes: ShortSNAT and ShortNodePort with a way of closing, and OpenSNAT.
const (
	ShortSNAT     = "snat-"
	ShortNodePort = "nodeport-"
	OpenSNAT      = "snat-open"
)

// The metrics of OpenSNAT.
const (
	FirstPod  = "first"
	SecondPod = "second"
	OnePlace  = "place"
	TwoPlaces = "places"
)

// ports are of what a network masquerades towards one address and port.
func ports() (all []Workload) {
	const (
		takes = 500 * time.Millisecond
		note  = "All connections go to one address and port. The server sends one byte, and then the connection ends. 160 connections are in flight. " +
			"A sample lasts five minutes in the full profile and three seconds in the quick one. A connection has failed if it is refused, or not complete after two seconds; it has stalled if it took more than 200 ms."
	)
	for _, how := range Closes() {
		metrics := []Metric{
			{Name: Rate, Title: how.said(), Unit: "1/s", Scale: 1}, lower(Failed, how.said()+": failed", "connections"), lower(Stalled, how.said()+": stalled", "connections"),
		}
		all = append(all,
			Workload{Name: ShortSNAT + string(how), Title: how.said(), Kind: Closing, Close: how, Paths: []string{Egress}, Named: true, Once: true,
				Modes: []string{EBPF, IPTables, IPv6, IPTablesIPv6, KubeProxy, NFTables}, Axis: "pods", Points: []int{1, ManyPods}, Takes: takes, Metrics: metrics,
				Note: "From the pods of a node to a host outside, masqueraded. " + note},
			Workload{Name: ShortNodePort + string(how), Title: how.said() + ", through a NodePort", Kind: Closing, Close: how, Paths: []string{Inbound}, Named: true, Once: true, Served: true,
				Modes: []string{EBPF, IPTables, NFTables}, Takes: takes, Metrics: metrics, Note: "From the host outside to the NodePort of a node, with the backend on another node. " + note})
	}
	return append(all, Workload{
		Name: OpenSNAT, Title: "open connections", Kind: Open, Size: 32_000, Paths: []string{Egress}, Named: true, Once: true,
		Modes: []string{EBPF, IPTables, IPv6, IPTablesIPv6, KubeProxy, NFTables}, Takes: 30 * time.Second,
		Metrics: []Metric{
			{Name: FirstPod, Title: "of one pod to one place", Unit: "connections", Scale: 1}, {Name: SecondPod, Title: "of a second pod to the same place", Unit: "connections", Scale: 1},
			{Name: OnePlace, Title: "of a node to one place", Unit: "connections", Scale: 1}, {Name: TwoPlaces, Title: "of a node to two places", Unit: "connections", Scale: 1},
		},
		Note: "A place is an address and port outside. The first pod tries 32 000 connections to one, then the second pod 8192, then eight more as many as make 50 000, and to another place as many as make 62 000. " +
			"All stay open, and at the end the server sends a byte on each, which has to arrive on one in 250.",
	})
}
