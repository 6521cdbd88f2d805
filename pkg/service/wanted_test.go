package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func addrs(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

func TestWanted(t *testing.T) {
	tcp := []Port{{Protocol: wire.TCP, Port: 80}}
	np := []Port{{Protocol: wire.TCP, Port: 80, NodePort: 30080}}
	name := Name{"ns", "a"}
	for _, tt := range []struct {
		name    string
		service Service
		slices  []*Slice
		options Options
		want    string
		ranges  string
		problem Reason
		says    string
	}{
		{name: "no address", service: Service{Ports: tcp}},
		{name: "a ClusterIP", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: tcp}, want: "10.96.0.1:80 tcp cluster"},
		{name: "both families", service: Service{ClusterIPs: addrs("10.96.0.1", "fd00::1"), Ports: tcp}, want: "10.96.0.1:80 tcp cluster; [fd00::1]:80 tcp cluster"},
		{name: "one number, two protocols", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"a", wire.TCP, 53, 0}, {"a", wire.UDP, 53, 0}}},
			want: "10.96.0.1:53 tcp cluster; 10.96.0.1:53 udp cluster"},
		{name: "addresses from outside", service: Service{ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("192.0.2.1"), LoadBalancerIPs: addrs("192.0.2.2", "192.0.2.1"), Ports: tcp},
			options: Options{ExternalIPs: true}, want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp, 192.0.2.1:80 tcp"},
		{name: "externalIPs are not wanted", service: Service{ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("192.0.2.1"), LoadBalancerIPs: addrs("192.0.2.2"), Ports: tcp},
			want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp"},
		{name: "addresses of a family that the Service does not have", service: Service{
			ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("192.0.2.1", "2001:db8::1"), LoadBalancerIPs: addrs("2001:db8::2", "192.0.2.2"), Ports: np,
		}, options: Options{ExternalIPs: true, HeldAddresses: map[netip.Addr]bool{netip.MustParseAddr("2001:db8::2"): true}},
			want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp, 192.0.2.1:80 tcp, *:30080 tcp"},
		{name: "the same of a Service of IPv6", service: Service{
			ClusterIPs: addrs("fd00::1"), ExternalIPs: addrs("192.0.2.1", "2001:db8::1"), LoadBalancerIPs: addrs("2001:db8::2", "192.0.2.2"), Ports: np,
		}, options: Options{ExternalIPs: true}, want: "[fd00::1]:80 tcp cluster, [2001:db8::2]:80 tcp, [2001:db8::1]:80 tcp, *:30080 tcp"},
		{name: "internal policy Local", service: Service{ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs("192.0.2.2"), InternalLocal: true, Ports: tcp},
			want: "10.96.0.1:80 tcp cluster local, 192.0.2.2:80 tcp"},
		{name: "external policy Local", service: Service{ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs("192.0.2.2"), ExternalIPs: addrs("192.0.2.1"), ExternalLocal: true, Ports: np},
			options: Options{ExternalIPs: true}, want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp external_local, 192.0.2.1:80 tcp external_local, *:30080 tcp external_local"},
		{name: "NodePorts, in the Service's families", service: Service{ClusterIPs: addrs("10.96.0.1", "fd00::1"), ExternalIPs: addrs("192.0.2.1"), Ports: np},
			want: "10.96.0.1:80 tcp cluster, *:30080 tcp; [fd00::1]:80 tcp cluster, *:30080 tcp"},
		{name: "a NodePort of a ClusterIP that the node has", service: Service{ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("192.0.2.1"), Ports: np},
			options: Options{ExternalIPs: true, HeldAddresses: map[netip.Addr]bool{netip.MustParseAddr("10.96.0.1"): true}}, want: "192.0.2.1:80 tcp, *:30080 tcp"},
		{name: "a NodePort twice", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"a", wire.TCP, 80, 30080}, {"b", wire.UDP, 80, 30080}, {"c", wire.TCP, 81, 30080}}},
			want: "10.96.0.1:80 tcp cluster, *:30080 tcp; 10.96.0.1:80 udp cluster, *:30080 udp", problem: Malformed, says: "or its NodePort is"},
		{name: "endpoints that are the node's own sockets", service: Service{
			ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("192.0.2.1", "192.0.2.3", "192.0.2.4"), LoadBalancerIPs: addrs("192.0.2.2"), Ports: tcp,
		}, slices: []*Slice{{Ports: []SlicePort{{"", wire.TCP, 80}}, Endpoints: []Endpoint{ep(t, "192.0.2.1"), ep(t, "192.0.2.2"), ep(t, "192.0.2.3")}}},
			options: Options{ExternalIPs: true, HeldAddresses: map[netip.Addr]bool{
				netip.MustParseAddr("192.0.2.1"): true, netip.MustParseAddr("192.0.2.2"): true, netip.MustParseAddr("192.0.2.4"): true,
			}}, want: "10.96.0.1:80 tcp cluster, 192.0.2.3:80 tcp, 192.0.2.4:80 tcp"},
		{name: "source ranges", service: Service{
			ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs("192.0.2.2", "192.0.2.3"), ExternalIPs: addrs("192.0.2.1", "192.0.2.3"), Ports: np,
			SourceRanges: prefixes("198.51.100.0/24", "2001:db8::/32"),
		}, options: Options{ExternalIPs: true}, ranges: "198.51.100.0/24",
			want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp ranges, 192.0.2.3:80 tcp ranges, 192.0.2.1:80 tcp, *:30080 tcp"},
		{name: "source ranges of the other family", service: Service{ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs("192.0.2.2"), Ports: tcp, SourceRanges: prefixes("2001:db8::/32")},
			want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp ranges"},
		{name: "no source range that can be read", service: Service{ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs("192.0.2.2"), Ports: tcp, SourceRanges: []netip.Prefix{}},
			want: "10.96.0.1:80 tcp cluster, 192.0.2.2:80 tcp ranges"},
		{name: "an SCTP NodePort", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"", sctp, 80, 30080}}},
			slices: []*Slice{{Ports: []SlicePort{{"", sctp, 80}}, Endpoints: []Endpoint{ep(t, "10.0.0.1")}}}, want: "10.96.0.1:80 132 cluster",
			problem: Unsupported, says: "port 30080 is SCTP and its endpoints listen on port 80"},
		{name: "a ClusterIP of the node's", service: Service{ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs("10.96.0.1", "192.0.2.2"), Ports: tcp},
			options: Options{HeldAddresses: map[netip.Addr]bool{netip.MustParseAddr("10.96.0.1"): true, netip.MustParseAddr("192.0.2.2"): true}}, want: "192.0.2.2:80 tcp"},
		{name: "SCTP", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"", sctp, 80, 0}, {"other", wire.TCP, 80, 0}}},
			slices: []*Slice{{Ports: []SlicePort{{"", sctp, 80}}, Endpoints: []Endpoint{ep(t, "10.0.0.1")}}}, want: "10.96.0.1:80 132 cluster; 10.96.0.1:80 tcp cluster"},
		{name: "SCTP to another port", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"", sctp, 80, 0}, {"other", wire.TCP, 80, 0}}},
			slices: []*Slice{{Ports: []SlicePort{{"", sctp, 81}}, Endpoints: []Endpoint{ep(t, "10.0.0.1")}}}, want: "10.96.0.1:80 tcp cluster",
			problem: Unsupported, says: "port 80 is SCTP and its endpoints listen on port 81"},
		{name: "a protocol of no Service", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"", wire.ICMP, 80, 0}}}, problem: Unsupported, says: "protocol icmp"},
		{name: "no number", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"x", wire.TCP, 0, 0}}}, problem: Malformed, says: `port "x" has no number`},
		{name: "a port twice", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"a", wire.TCP, 80, 0}, {"b", wire.TCP, 80, 0}}},
			want: "10.96.0.1:80 tcp cluster", problem: Malformed, says: "port 80 tcp is there twice"},
		{name: "a name twice", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{"a", wire.TCP, 80, 0}, {"a", wire.TCP, 81, 0}}},
			want: "10.96.0.1:80 tcp cluster", problem: Malformed, says: `its name "a"`},
		{name: "a long name", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: []Port{{strings.Repeat("x", 64), wire.TCP, 80, 0}, {strings.Repeat("x", 63), wire.TCP, 81, 0}}},
			want: "10.96.0.1:81 tcp cluster", problem: Malformed, says: "longer than 63"},
		{name: "what the source could not read", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: tcp, Malformed: "an address is none"},
			want: "10.96.0.1:80 tcp cluster", problem: Malformed, says: "an address is none"},
		{name: "a slice that could not be read", service: Service{ClusterIPs: addrs("10.96.0.1"), Ports: tcp}, slices: []*Slice{{Name: Name{"ns", "a-x"}, Malformed: "no port"}},
			want: "10.96.0.1:80 tcp cluster", problem: Malformed, says: "EndpointSlice ns/a-x: no port"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.service.Name = name
			m := NewModel()
			m.of[name] = tt.slices
			sets, problems := wanted(&tt.service, m, tt.options)
			var got []string
			for _, w := range sets {
				var frontends []string
				for _, f := range w.frontends {
					text := f.String()
					if f.clusterIP {
						text += " cluster"
					}
					if f.flags != 0 {
						text += " " + f.flags.String()
					}
					frontends = append(frontends, text)
				}
				got = append(got, strings.Join(frontends, ", "))
			}
			if all := strings.Join(got, "; "); all != tt.want {
				t.Errorf("frontends: %s\n     want: %s", all, tt.want)
			}
			var ranges []string
			for _, w := range sets {
				ranges = append(ranges, textsOf(w.ranges)...)
			}
			if all := strings.Join(ranges, ", "); all != tt.ranges {
				t.Errorf("ranges: %s, want %s", all, tt.ranges)
			}
			if tt.problem == "" {
				if len(problems) > 0 {
					t.Errorf("problems: %v", problems)
				}
			} else if len(problems) != 1 || problems[0].Service != name || problems[0].Reason != tt.problem || !strings.Contains(problems[0].Text, tt.says) {
				t.Errorf("problems: %+v, want one, %s, that says %q", problems, tt.problem, tt.says)
			}
		})
	}
}

func TestModel(t *testing.T) {
	a, as := web(t, "a", "10.96.0.1", "10.0.0.1")
	b, bs := web(t, "b", "10.96.0.2", "10.0.0.2")
	elsewhere := bs
	elsewhere.Service = "a"
	later := a
	later.Created = a.Created.Add(time.Second)
	m := NewModel()
	for _, step := range []struct {
		name   string
		update Update
		want   string
	}{
		{"before the lists", Update{Services: []Service{a}}, "[]"},
		{"the lists", Update{Complete: true, Services: []Service{a, b}, Slices: []Slice{as}}, "[ns/a ns/b]"},
		{"the same again", Update{Services: []Service{a}, Slices: []Slice{as}}, "[]"},
		{"a slice", Update{Slices: []Slice{bs}}, "[ns/b]"},
		{"a slice that goes to another Service", Update{Slices: []Slice{elsewhere}}, "[ns/a ns/b]"},
		{"a Service made anew", Update{Services: []Service{later}}, "[ns/a]"},
		{"the lists with nothing new", Update{Complete: true, Services: []Service{b, later}, Slices: []Slice{elsewhere, as}}, "[]"},
		{"lists that lack something", Update{Complete: true, Services: []Service{later}, Slices: []Slice{as}}, "[ns/a ns/b]"},
		{"an error", Update{Complete: true, Err: fmt.Errorf("no API")}, "[]"},
		{"what is gone already", Update{GoneServices: []Name{b.Name}, GoneSlices: []Name{bs.Name}}, "[]"},
		{"a slice goes", Update{GoneSlices: []Name{as.Name}}, "[ns/a]"},
		{"a Service goes", Update{GoneServices: []Name{a.Name}}, "[ns/a]"},
	} {
		if got := fmt.Sprint(m.Apply(step.update)); got != step.want {
			t.Errorf("%s: %v have changed, want %v", step.name, got, step.want)
		}
	}
	if len(m.Names())+len(m.Slices(a.Name))+len(m.of) != 0 || !m.Complete() {
		t.Errorf("the model still has %v, %v", m.Names(), m.of)
	}
}

// A slice may come before its Service, and there may be several.
func TestModelSlices(t *testing.T) {
	m := NewModel()
	m.Apply(Update{Complete: true})
	for _, n := range []string{"z", "x", "y"} {
		m.Apply(Update{Slices: []Slice{{Name: Name{"ns", n}, Service: "a"}}})
	}
	var names []string
	for _, s := range m.Slices(Name{"ns", "a"}) {
		names = append(names, s.Name.Name)
	}
	if !slices.Equal(names, []string{"x", "y", "z"}) || m.Service(Name{"ns", "a"}) != nil {
		t.Errorf("slices %v", names)
	}
}
