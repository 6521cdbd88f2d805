package service

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ep makes an endpoint out of an address and words: dead (neither ready nor serving), leaving (terminating, still serving), left
// (terminating, serving no more), @NODE, ^NODE and ~ZONE (hints). It is ready if none of the words says otherwise.
func ep(t testing.TB, text string) Endpoint {
	t.Helper()
	words := strings.Fields(text)
	e := Endpoint{Address: netip.MustParseAddr(words[0]), Ready: true, Serving: true}
	for _, w := range words[1:] {
		switch {
		case w == "dead":
			e.Ready, e.Serving = false, false
		case w == "leaving":
			e.Ready, e.Terminating = false, true
		case w == "left":
			e.Ready, e.Serving, e.Terminating = false, false, true
		case w == "published": // publishNotReadyAddresses, while it terminates
			e.Serving, e.Terminating = false, true
		case w[0] == '@':
			e.Node = w[1:]
		case w[0] == '^':
			e.ForNodes = append(e.ForNodes, w[1:])
		case w[0] == '~':
			e.ForZones = append(e.ForZones, w[1:])
		default:
			t.Fatalf("an endpoint is not %q", w)
		}
	}
	return e
}

// slice makes a slice of one unnamed TCP port.
func slice(t testing.TB, port uint16, endpoints ...string) *Slice {
	t.Helper()
	s := &Slice{Ports: []SlicePort{{Protocol: wire.TCP, Port: port}}}
	for _, text := range endpoints {
		s.Endpoints = append(s.Endpoints, ep(t, text))
	}
	return s
}

// show is a text of what was chosen: the sets that each backend is in, "-" for none, "answers" for none if it may go on all the same,
// and "world" for one without a node.
func show(all []Backend) string {
	var out []string
	for _, b := range all {
		sets := ""
		if b.Cluster {
			sets += "C"
		}
		if b.Local {
			sets += "L"
		}
		switch {
		case sets == "" && b.Answers:
			sets = "answers"
		case sets == "":
			sets = "-"
		case !b.Answers:
			sets += " dead"
		}
		if !b.OnNode {
			sets += " world"
		}
		out = append(out, fmt.Sprintf("%v %s", b.Address.With(wire.PortFrom(b.Port)), sets))
	}
	return strings.Join(out, ", ")
}

func TestChoose(t *testing.T) {
	local, external := Service{InternalLocal: true}, Service{ExternalLocal: true}
	one := func(texts ...string) []*Slice { return []*Slice{slice(t, 80, texts...)} }
	for _, tt := range []struct {
		name    string
		service Service
		slices  []*Slice
		want    string
	}{
		{"no slices", Service{}, nil, ""},
		{"a slice without endpoints", local, one(), ""},

		// Ready, serving, terminating.
		{"ready ones", Service{}, one("10.0.0.1 @me", "10.0.0.2 @n2"), "10.0.0.1:80 C, 10.0.0.2:80 C"},
		{"one is not ready", Service{}, one("10.0.0.1 @me", "10.0.0.2 @n2 dead"), "10.0.0.1:80 C, 10.0.0.2:80 -"},
		{"one terminates", Service{}, one("10.0.0.1 @me", "10.0.0.2 @n2 leaving"), "10.0.0.1:80 C, 10.0.0.2:80 answers"},
		{"all terminate", Service{}, one("10.0.0.1 @me leaving", "10.0.0.2 @n2 leaving"), "10.0.0.1:80 C, 10.0.0.2:80 C"},
		{"all terminate and one serves no more", Service{}, one("10.0.0.1 @me leaving", "10.0.0.2 @n2 left"), "10.0.0.1:80 C, 10.0.0.2:80 -"},
		{"none serves", Service{}, one("10.0.0.1 @me left", "10.0.0.2 @n2 dead"), "10.0.0.1:80 -, 10.0.0.2:80 -"},
		{"not ready ones do not replace terminating ones", Service{}, one("10.0.0.1 @me dead", "10.0.0.2 @n2 leaving"), "10.0.0.1:80 -, 10.0.0.2:80 C"},
		{"published although not ready", Service{}, one("10.0.0.1 @me published", "10.0.0.2 @n2"), "10.0.0.1:80 C, 10.0.0.2:80 C"},

		// Traffic policies.
		{"internal policy Local", local, one("10.0.0.1 @me", "10.0.0.2 @n2"), "10.0.0.1:80 CL, 10.0.0.2:80 C"},
		{"external policy Local", external, one("10.0.0.1 @me", "10.0.0.2 @n2"), "10.0.0.1:80 CL, 10.0.0.2:80 C"},
		{"none here", local, one("10.0.0.2 @n2"), "10.0.0.2:80 C"},
		{"Local falls back alone", local, one("10.0.0.1 @me leaving", "10.0.0.2 @n2"), "10.0.0.1:80 L, 10.0.0.2:80 C"},
		{"Cluster and Local fall back", local, one("10.0.0.1 @me leaving", "10.0.0.2 @n2 leaving"), "10.0.0.1:80 CL, 10.0.0.2:80 C"},
		{"neither falls back", local, one("10.0.0.1 @me", "10.0.0.2 @me leaving", "10.0.0.3 @n2 leaving"), "10.0.0.1:80 CL, 10.0.0.2:80 answers, 10.0.0.3:80 answers"},
		{"the one here serves no more", local, one("10.0.0.1 @me left", "10.0.0.2 @n2"), "10.0.0.1:80 -, 10.0.0.2:80 C"},
		{"without a node it is nowhere near", local, one("10.0.0.1", "192.0.2.1"), "10.0.0.1:80 C world, 192.0.2.1:80 C world"},

		// Hints.
		{"hints for this zone", Service{}, one("10.0.0.1 @n1 ~here", "10.0.0.2 @n2 ~there"), "10.0.0.1:80 C, 10.0.0.2:80 answers"},
		{"hints for several zones", Service{}, one("10.0.0.1 @n1 ~there ~here", "10.0.0.2 @n2 ~there"), "10.0.0.1:80 C, 10.0.0.2:80 answers"},
		{"no hint for this zone", Service{}, one("10.0.0.1 @n1 ~there", "10.0.0.2 @n2 ~there"), "10.0.0.1:80 C, 10.0.0.2:80 C"},
		{"one has no hint", Service{}, one("10.0.0.1 @n1 ~here", "10.0.0.2 @n2"), "10.0.0.1:80 C, 10.0.0.2:80 C"},
		{"the one without a hint is not ready", Service{}, one("10.0.0.1 @n1 ~here", "10.0.0.2 @n2 dead", "10.0.0.3 @n3 ~there"), "10.0.0.1:80 C, 10.0.0.2:80 -, 10.0.0.3:80 answers"},
		{"the one for this zone is not ready", Service{}, one("10.0.0.1 @n1 ~here dead", "10.0.0.2 @n2 ~there"), "10.0.0.1:80 -, 10.0.0.2:80 C"},
		{"terminating ones have no zone", Service{}, one("10.0.0.1 @n1 ~here leaving", "10.0.0.2 @n2 ~there leaving"), "10.0.0.1:80 C, 10.0.0.2:80 C"},
		{"hints for this node", Service{}, one("10.0.0.1 @me ~here ^me", "10.0.0.2 @n2 ~here ^n2"), "10.0.0.1:80 C, 10.0.0.2:80 answers"},
		{"none for this node, the zone's are next", Service{}, one("10.0.0.1 @n1 ~here ^n1", "10.0.0.2 @n2 ~there ^n2"), "10.0.0.1:80 C, 10.0.0.2:80 answers"},
		{"one has no hint for a node", Service{}, one("10.0.0.1 @me ~here ^me", "10.0.0.2 @n2 ~here", "10.0.0.3 @n3 ~there"), "10.0.0.1:80 C, 10.0.0.2:80 C, 10.0.0.3:80 answers"},
		{"hints leave Local alone", local, one("10.0.0.1 @me ~there", "10.0.0.2 @n2 ~here"), "10.0.0.1:80 L, 10.0.0.2:80 C"},

		// Slices.
		{"two slices", Service{}, []*Slice{slice(t, 80, "10.0.0.2 @n2"), slice(t, 80, "10.0.0.1 @n1")}, "10.0.0.1:80 C, 10.0.0.2:80 C"},
		{"one mentioned twice", Service{}, []*Slice{slice(t, 80, "10.0.0.1 @n1"), slice(t, 80, "10.0.0.1 @n1")}, "10.0.0.1:80 C"},
		{"ready in one, terminating in another", Service{}, []*Slice{slice(t, 80, "10.0.0.1 @n1 leaving"), slice(t, 80, "10.0.0.1 @n1")}, "10.0.0.1:80 C"},
		{"here in one, elsewhere in another", local, []*Slice{slice(t, 80, "10.0.0.1 @n1"), slice(t, 80, "10.0.0.1 @me")}, "10.0.0.1:80 CL"},
		{"target ports that differ", Service{}, []*Slice{slice(t, 81, "10.0.0.1 @n1"), slice(t, 80, "10.0.0.1 @n1")}, "10.0.0.1:80 C, 10.0.0.1:81 C"},
		{"the other family", Service{}, one("10.0.0.1 @n1", "fd00::1 @n1"), "10.0.0.1:80 C"},
		{"no target port", Service{}, []*Slice{slice(t, 0, "10.0.0.1 @n1")}, ""},
		{"a port of another name", Service{}, []*Slice{{Ports: []SlicePort{{Name: "x", Protocol: wire.TCP, Port: 80}}, Endpoints: []Endpoint{ep(t, "10.0.0.1")}}}, ""},
		{"one number for two protocols", Service{}, []*Slice{
			{Ports: []SlicePort{{Protocol: wire.UDP, Port: 53}, {Protocol: wire.TCP, Port: 54}}, Endpoints: []Endpoint{ep(t, "10.0.0.1 @n1")}},
		}, "10.0.0.1:54 C"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Choose(&tt.service, Port{Protocol: wire.TCP, Port: 80}, wire.IPv4, byPort(tt.slices), Options{NodeName: "me", Zone: "here"})
			if show(got) != tt.want {
				t.Errorf("chosen: %s\n  want: %s", show(got), tt.want)
			}
		})
	}
}

// Who has no name or no zone is meant by no hint, not even by an empty one.
func TestChooseWithoutPlace(t *testing.T) {
	all := []*Slice{slice(t, 80, "10.0.0.1 ~ ^", "10.0.0.2 ~a ^b")}
	want := "10.0.0.1:80 C world, 10.0.0.2:80 C world"
	if got := show(Choose(&Service{InternalLocal: true}, Port{Protocol: wire.TCP}, wire.IPv4, byPort(all), Options{})); got != want {
		t.Errorf("chosen: %s, want %s", got, want)
	}
}

func TestChooseIPv6(t *testing.T) {
	all := []*Slice{slice(t, 80, "10.0.0.1 @n1", "fd00::1 @n1")}
	if got := show(Choose(&Service{}, Port{Protocol: wire.TCP}, wire.IPv6, byPort(all), Options{})); got != "[fd00::1]:80 C" {
		t.Errorf("chosen: %s", got)
	}
}
