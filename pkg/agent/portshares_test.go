package agent

import (
	"net"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// portList are the ports of a list in the kernel's notation.
func portList(t *testing.T, s string) ports {
	t.Helper()
	p, err := parsePorts(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The host keeps the larger of half its ephemeral ports and 8 192, whatever is asked for.
func TestPortShares(t *testing.T) {
	t.Parallel()
	var every ports
	every.add(1, 65535)
	for name, tt := range map[string]struct {
		ephemeral           PortRange
		asked, others, used ports
		want                string
		problems            string
	}{
		"a default node":            {asked: between(49152, 65535), ephemeral: PortRange{32768, 60999}, want: "49152-65535"},
		"outside the ephemeral":     {asked: between(1025, 32767), ephemeral: PortRange{32768, 60999}, want: "1025-32767"},
		"the ephemeral of IANA":     {asked: between(49152, 65535), ephemeral: PortRange{49152, 65535}, want: "58368-65535", problems: "snat_ports 49152-65535"},
		"a wide range":              {asked: between(32768, 65535), ephemeral: PortRange{32768, 60999}, want: "48649-65535", problems: "snat_ports 32768-65535"},
		"the same from below":       {asked: between(10000, 60999), ephemeral: PortRange{32768, 60999}, want: "10000-32767,48649-60999", problems: "snat_ports 10000-60999"},
		"nearly all are ephemeral":  {asked: between(49152, 65535), ephemeral: PortRange{1024, 65535}, want: "49152-65535"},
		"all are the host's":        {asked: between(49152, 65535), ephemeral: PortRange{50000, 58191}, want: "49152-49999,58192-65535", problems: "snat_ports 49152-65535"},
		"nothing is left":           {asked: between(52000, 53000), ephemeral: PortRange{50000, 58191}, want: "", problems: "snat_ports 52000-53000"},
		"one can be spared":         {asked: between(52000, 53000), ephemeral: PortRange{50000, 58193}, want: "53000", problems: "snat_ports 52000-53000"},
		"others' reservations":      {asked: between(49152, 65535), ephemeral: PortRange{32768, 60999}, others: between(32768, 42767), want: "57399-65535", problems: "snat_ports 49152-65535"},
		"others have reserved ours": {asked: between(49152, 65535), ephemeral: PortRange{32768, 60999}, others: between(49152, 65535), want: "49152-65535"},
		"others have reserved all":  {asked: between(49152, 65535), ephemeral: PortRange{50000, 60000}, others: between(49152, 65535), want: "49152-65535", problems: "ephemeral_ports "},
		"few ephemeral ones":        {asked: between(49152, 65535), ephemeral: PortRange{40000, 40999}, want: "49152-65535", problems: "ephemeral_ports "},
		"some host ports": {
			asked: between(49152, 65535), ephemeral: PortRange{49152, 65535}, used: between(50000, 50999, 80, 30000), want: "58368-65535", problems: "snat_ports 49152-65535, reserved_ports ",
		},
		"fewer host ports": {
			asked: between(49152, 65535), ephemeral: PortRange{49152, 65535}, used: between(50000, 50817, 80, 30000), want: "58368-65535", problems: "snat_ports 49152-65535",
		},
		"too many host ports": {
			asked: between(49152, 65535), ephemeral: PortRange{49152, 65535}, used: between(50000, 51999), want: "58368-65535", problems: "snat_ports 49152-65535, unreserved_ports ",
		},
		"a default node's default": {asked: usualSnat.ports(), ephemeral: PortRange{32768, 60999}, want: "1024-32767,48649-65535"},
		"all that are ephemeral":   {asked: usualSnat.ports(), ephemeral: PortRange{1024, 65535}, want: "37312-65535"},
		"several ranges":           {asked: portList(t, "10000-19999,30000-35000,40000-45000"), ephemeral: PortRange{32768, 60999}, want: "10000-19999,30000-35000,40000-45000"},
		"too many pieces": {
			asked: portList(t, "1025-65535"), ephemeral: PortRange{32768, 60999}, others: portList(t, "33000,34000-34001,35000-35002,36000-36003"), want: "1025-32767,35000-35002,36000-36003,48658-65535",
			problems: "snat_ports 1025-65535",
		},
		"a default node's, most reserved in pieces": {
			asked: usualSnat.ports(), ephemeral: PortRange{32768, 60999}, others: portList(t, "1-1999,4000-5999,8000-9999,12000-13999,16000-65535"), want: "2000-3999,6000-7999,10000-11999,14000-15999",
			problems: "snat_ports auto, ephemeral_ports ",
		},
		"a default node's, some reserved": {
			asked: usualSnat.ports(), ephemeral: PortRange{32768, 60999}, others: portList(t, "1-1999,8080,34000,50000-65535"), want: "2000-8079,8081-32767,47275-49999",
		},
		"any number of host ports": {asked: between(49152, 65535), ephemeral: PortRange{32768, 60999}, used: every, want: "49152-65535", problems: "unreserved_ports "},
	} {
		s := shareSnat(tt.asked, tt.asked == usualSnat.ports(), tt.ephemeral, tt.others)
		s.add(tt.used)
		var problems []string
		for _, p := range s.problems() {
			problems = append(problems, p.Subject())
			if p.Remedy == "" || strings.Contains(p.Text+p.Remedy, "%!") {
				t.Errorf("%s: %+v", name, p)
			}
		}
		if n := len(s.snat.ranges()); n > config.PortRanges {
			t.Errorf("%s: %d pieces to masquerade to", name, n)
		}
		if got := strings.Join(problems, ", "); s.snat.String() != tt.want || got != tt.problems {
			t.Errorf("%s: masquerades to %s, problems %q; want %s, %q", name, s.snat, got, tt.want, tt.problems)
		}
		own, size := tt.ephemeral.ports().without(s.ours), tt.ephemeral.size()
		if least := min(s.free.count(), max(size/2, 8192)); own.count() < least {
			t.Errorf("%s: %d of %d ephemeral ports are left to the host, want %d", name, own.count(), size, least)
		}
		if left := tt.used.without(s.ours); left.count() != s.unreserved || left.without(tt.ephemeral.ports()) != (ports{}) {
			t.Errorf("%s: %d ports in use are not reserved, %d are said not to be: %s", name, left.count(), s.unreserved, left)
		}
	}
}

// Flows that begin below 1024 get a piece of ports that nobody has reserved, unless the administrator names ports.
func TestPrivilegedPorts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		auto         bool
		others, want string
	}{{true, "", "665-852"}, {true, "694,700-749", "750-852"}, {true, "1-1023", ""}, {false, "", ""}} {
		if got := shareSnat(usualSnat.ports(), tt.auto, PortRange{32768, 60999}, portList(t, tt.others)).privileged; got.String() != tt.want {
			t.Errorf("where others have reserved %q: %s, want %q", tt.others, got, tt.want)
		}
	}
}

// Where netfilter serves NodePorts nobody else could say which have no owner; who names ports gets them.
func TestPortsBesideNetfilter(t *testing.T) {
	t.Parallel()
	named, err := ParsePortRanges("30000-30009")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		asked      []PortRange
		level      netfilter.Level
		snat, want string
	}{
		{nil, netfilter.Translates, "1024-32767,48649-65535", "1024-29999,48649-65535"},
		{nil, netfilter.Translates, "1024-8079,8081-32999,33001-39999,48649-65535", "1024-8079,8081-29999,33001-39999,48649-65535"},
		{nil, netfilter.Masquerades, "1024-32767,48649-65535", "1024-32767,48649-65535"},
		{nil, netfilter.Nothing, "1024-32767,48649-65535", "1024-32767,48649-65535"},
		{named, netfilter.Translates, "30000-30009", "30000-30009"},
	} {
		got := Config{SnatPorts: tt.asked}.snatBeside(tt.level, snatGiven{snat: portList(t, tt.snat)}).snat
		if got.String() != tt.want {
			t.Errorf("of %s at %v: %s, want %s", tt.snat, tt.level, got, tt.want)
		}
	}
}

func TestPortRange(t *testing.T) {
	t.Parallel()
	if r, err := parsePortRange("32768\t60999"); r != (PortRange{32768, 60999}) || err != nil || r.size() != 28232 {
		t.Errorf("%s, error %v", r, err)
	}
	for _, bad := range []string{"", "1", "x y", "1 70000"} {
		if r, err := parsePortRange(bad); err == nil {
			t.Errorf("%q is %s", bad, r)
		}
	}
}

// bindAny has the kernel choose a port for sockets of both families.
func bindAny(t *testing.T) {
	t.Helper()
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		tcp, err := net.Listen("tcp", at)
		if err != nil {
			t.Errorf("a port of any number: %v", err)
			continue
		}
		tcp.Close()
		udp, err := net.ListenPacket("udp", at)
		if err != nil {
			t.Errorf("a port of any number: %v", err)
			continue
		}
		udp.Close()
	}
}

// The node's own sockets get ports whatever the range of ephemeral ones is when the agent starts, or becomes later; the programs
// follow.
func TestEphemeralPortsAreLeft(t *testing.T) {
	l := testLoop(t)
	log := logged(l)
	sysctl := device.Sysctl{}
	become := func(ephemeral string) {
		t.Helper()
		if _, err := sysctl.Set(ephemeralPorts, ephemeral); err != nil {
			t.Fatal(err)
		}
	}
	become("50000 60000") // what testLoop masquerades to
	shares, err := l.sysctls.portShares()
	if err != nil || shares.snat != between(58419, 60000) {
		t.Errorf("the first programs would masquerade to %s, error %v", shares.snat, err)
	}
	l.mode.beginWith(shares.snatGiven)
	ready(t, l)
	if l.follow(t, l.complaints.now()) {
		t.Error("the programs are replaced at once")
	}
	for _, tt := range []struct{ ephemeral, snat, reserved, problem string }{
		{"50000 60000", "58419-60000", "58419-60000", snatPortsReduced},
		{"32768 60999", "50000-60000", "50000-60000", ""},
		{"49152 65535", "52833-60000", "52833-60000", snatPortsReduced},
		{"52000 60191", "50000-51999", "", snatPortsReduced},
		{"32768 54999", "50000-60000", "50000-54999", ""},
		{"1024 65535", "50000-60000", "50000-60000", ""},
	} {
		before := l.mode.snat
		become(tt.ephemeral)
		l.inspect(t.Context())
		l.judge()
		if got := l.follow(t, l.complaints.now()); got != (before.String() != tt.snat) {
			t.Errorf("%s: programs replaced: %v", tt.ephemeral, got)
		}
		if l.mode.snat.String() != tt.snat {
			t.Errorf("%s: the programs masquerade to %s, want %s", tt.ephemeral, l.mode.snat, tt.snat)
		}
		if got, err := sysctl.Get(reservedPorts); got != tt.reserved || err != nil {
			t.Errorf("%s: %s are reserved, error %v, want %s", tt.ephemeral, got, err, tt.reserved)
		}
		bindAny(t)
		l.expectNetworkProblems(t, tt.ephemeral, strings.Fields(tt.problem)...)
	}
	if !strings.Contains(log.String(), `"network problem" reason=snat_ports`) || !strings.Contains(log.String(), `"other ports to masquerade to" ports=52833-60000`) {
		t.Errorf("logged:\n%s", log)
	}
	if degraded := l.complaints.degraded(); len(degraded) > 0 {
		t.Errorf("degraded by %v", degraded)
	}
}

// What status shows is what new flows get, and nothing where none are masqueraded.
func TestPortsThatStatusShows(t *testing.T) {
	c := &modeController{node: &node{}, programMode: programMode{snatGiven: snatGiven{snat: portList(t, "1024-29999,40000-50000")}}}
	expect := func(want string) {
		t.Helper()
		if got := c.masqueradesTo(); got != want {
			t.Errorf("shows %q, want %q", got, want)
		}
	}
	expect("")
	c.cfg.Masquerade[wire.IPv6] = true
	expect("1024-29999,40000-50000")
	c.privileged = portList(t, "665-852")
	expect("1024-29999,40000-50000; below 1024: 665-852")
}
