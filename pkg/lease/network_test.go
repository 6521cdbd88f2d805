package lease

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestParseNetwork(t *testing.T) {
	for _, c := range []struct{ text, want, err string }{
		{`{"Network": "10.5.0.0/16"}`, "10.5.0.0/16/24 10.5.1.0-10.5.255.0", ""},
		{`{"network": "10.5.3.4/16", "subnetlen": 26}`, "10.5.0.0/16/26 10.5.0.64-10.5.255.192", ""},
		{`{"Network": "10.5.0.0/24"}`, "10.5.0.0/24/26 10.5.0.64-10.5.0.192", ""},
		{`{"Network": "10.5.0.0/28"}`, "10.5.0.0/28/30 10.5.0.4-10.5.0.12", ""},
		{`{"Network": "10.0.0.0/8", "SubnetMin": "10.10.0.0", "SubnetMax": "10.99.0.0"}`, "10.0.0.0/8/24 10.10.0.0-10.99.0.0", ""},
		{`{"Network": "10.5.0.0/16", "SubnetMin": "0.0.0.0"}`, "10.5.0.0/16/24 10.5.1.0-10.5.255.0", ""},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00::/48"}`, "10.5.0.0/16/24 10.5.1.0-10.5.255.0 fc00::/48/64 fc00:0:0:1::-fc00:0:0:ffff::", ""},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00::/63"}`, "10.5.0.0/16/24 10.5.1.0-10.5.255.0 fc00::/63/65 fc00::8000:0:0:0-fc00:0:0:1:8000::", ""},
		{`{"Network": "10.5.0.0/16", "IPv6Network": "nonsense"}`, "10.5.0.0/16/24 10.5.1.0-10.5.255.0", ""},
		{`{}`, "", "Network: is missing"},
		{`nonsense`, "", "no JSON"},
		{`{"Network": 7}`, "", "Network: is a number"},
		{`{"Network": "10.5.0.0"}`, "", "Network: "},
		{`{"Network": "fc00::/48"}`, "", "Network: "},
		{`{"Network": "10.5.0.0/29"}`, "", "Network: 10.5.0.0/29 is too small"},
		{`{"Network": "10.5.0.0/16", "SubnetLen": 31}`, "", "SubnetLen: is 31; at most 30"},
		{`{"Network": "10.5.0.0/16", "SubnetLen": 17}`, "", "SubnetLen: is 17; "},
		{`{"Network": "10.5.0.0/16", "SubnetLen": -1}`, "", "SubnetLen: "},
		{`{"Network": "10.5.0.0/16", "SubnetMin": "10.6.0.0"}`, "", "SubnetMin: 10.6.0.0 is not in 10.5.0.0/16"},
		{`{"Network": "10.5.0.0/16", "SubnetMax": "10.6.0.0"}`, "", "SubnetMax: 10.6.0.0 is not in 10.5.0.0/16"},
		{`{"Network": "10.5.0.0/16", "SubnetMin": "10.5.1.1"}`, "", "SubnetMin: 10.5.1.1 is not where"},
		{`{"Network": "10.5.0.0/16", "SubnetMin": "x"}`, "", `SubnetMin: "x" is no address`},
		{`{"Network": "10.5.0.0/16", "SubnetMin": "10.5.9.0", "SubnetMax": "10.5.8.0"}`, "", "SubnetMax: 10.5.8.0 is before"},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true}`, "", "IPv6Network: is missing"},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00::/125"}`, "", "IPv6Network: fc00::/125 is too small"},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00::/48", "IPv6SubnetLen": 127}`, "", "IPv6SubnetLen: is 127; at most 126"},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00::/48", "IPv6SubnetMin": "fc00::1"}`, "", "IPv6SubnetMin: fc00::1 is not where"},
		{`{"Network": "10.5.0.0/16", "EnableIPv6": true, "IPv6Network": "fc00::/48", "IPv6SubnetMax": "fc01::"}`, "", "IPv6SubnetMax: fc01:: is not in"},
		{`{"EnableIPv4": false, "EnableIPv6": true, "IPv6Network": "fc00::/48"}`, "", "EnableIPv4: "},
		{`{"EnableIPv4": false}`, "", "EnableIPv4: "},
	} {
		n, err := ParseNetwork([]byte(c.text))
		switch {
		case c.err != "":
			if err == nil || !strings.HasPrefix(err.Error(), c.err) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want %q", c.text, err, c.err)
			}
		case err != nil:
			t.Errorf("%s: %v", c.text, err)
		case n.String() != c.want:
			t.Errorf("%s: read %q, want %q", c.text, n, c.want)
		}
	}
}

// String is what a network leases of.
func (n Network) String() string {
	var all []string
	for _, r := range n.Ranges {
		if r.Prefix.IsValid() {
			all = append(all, r.Prefix.String()+"/"+netip.PrefixFrom(r.First, r.Bits).String()[len(r.First.String())+1:]+" "+r.First.String()+"-"+r.Last.String())
		}
	}
	return strings.Join(all, " ")
}

func TestParseBackend(t *testing.T) {
	for _, c := range []struct {
		text string
		want Backend
		err  string
	}{
		{``, Backend{Kind: VXLAN, Absent: true, VNI: 1, Port: 8472}, ""},
		{`{"Type": "vxlan"}`, Backend{Kind: VXLAN, VNI: 1, Port: 8472}, ""},
		{`{"Type": "vxlan", "vni": 7, "Port": 4789, "DirectRouting": true, "MTU": 1400, "Learning": true}`, Backend{Kind: VXLAN, VNI: 7, Port: 4789, Direct: true, MTU: 1400}, ""},
		{`{"Type": "host-gw", "VNI": -1}`, Backend{Kind: HostGW, VNI: 1, Port: 8472}, ""},
		{`{"Type": "udp"}`, Backend{}, `Backend: Type: "udp" is not served here`},
		{`{"Type": "wireguard"}`, Backend{}, `Backend: Type: "wireguard" is not`},
		{`{}`, Backend{}, `Backend: Type: "" is not`},
		{`7`, Backend{}, `Backend: `},
		{`{"Type": "vxlan", "VNI": "x"}`, Backend{}, `Backend: VNI: is a string`},
		{`{"Type": "vxlan", "VNI": 16777216}`, Backend{}, `Backend: VNI: is 16777216`},
		{`{"Type": "vxlan", "Port": 65536}`, Backend{}, `Backend: Port: is 65536`},
		{`{"Type": "vxlan", "MTU": 100}`, Backend{}, `Backend: MTU: is 100`},
		{`{"Type": "vxlan", "GBP": true}`, Backend{}, `Backend: GBP: `},
	} {
		text := `{"Network": "10.5.0.0/16"}`
		if c.text != "" {
			text = `{"Network": "10.5.0.0/16", "Backend": ` + c.text + `}`
		}
		n, err := ParseNetwork([]byte(text))
		if c.err == "" && (err != nil || n.Backend != c.want) || c.err != "" && (err == nil || !strings.HasPrefix(err.Error(), c.err)) {
			t.Errorf("%s: %+v, error %v", c.text, n.Backend, err)
		}
	}
}

func TestSubnetKeys(t *testing.T) {
	for _, text := range []string{"10.5.52.0-24", "10.5.52.0-24&fc00:0:0:34::-64"} {
		if s, ok := parseSubnet(text); !ok || s.String() != text {
			t.Errorf("%s is read as %v, %v", text, s, ok)
		}
	}
	for _, text := range []string{"", "10.5.52.0", "10.5.52.0-33", "10.5.52.0-24&", "10.5.52.0-24&10.0.0.0-8", "fc00::-64", "x-24"} {
		if s, ok := parseSubnet(text); ok {
			t.Errorf("%q is read as %v", text, s)
		}
	}
}

func TestChoose(t *testing.T) {
	network := func(text string) Network {
		n, err := ParseNetwork([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	subnet := func(text string) Subnet {
		s, ok := parseSubnet(text)
		if !ok {
			t.Fatal(text)
		}
		return s
	}
	dual := network(`{"Network": "10.5.0.0/22", "SubnetLen": 24, "EnableIPv6": true, "IPv6Network": "fc00::/62", "IPv6SubnetLen": 64}`)
	for _, c := range []struct{ what, prefer, taken, want string }{
		{"preferred", "10.5.2.0-24&fc00:0:0:2::-64", "10.5.1.0-24", "10.5.2.0-24&fc00:0:0:2::-64"},
		{"of one family", "10.5.2.0-24", "10.5.1.0-24&fc00:0:0:1::-64 10.5.3.0-24&fc00:0:0:3::-64", "10.5.2.0-24&fc00:0:0:2::-64"},
		{"preferred and taken", "10.5.2.0-24", "10.5.2.0-24&fc00:0:0:2::-63 10.5.1.0-24", "10.5.3.0-24&fc00:0:0:1::-64"},
		{"preferred and of no network", "10.6.2.0-24", "10.5.2.0-23 10.6.3.0-24&fc00:0:0:2::-63", "10.5.1.0-24&fc00:0:0:1::-64"},
		{"full", "10.5.2.0-24", "10.5.0.0-22", ""},
	} {
		var all []Subnet
		for text := range strings.FieldsSeq(c.taken) {
			all = append(all, subnet(text))
		}
		got, err := dual.choose([]Subnet{subnet(c.prefer)}, all)
		if err == nil != (c.want != "") || err == nil && got.String() != c.want {
			t.Errorf("%s: %s, error %v", c.what, got, err)
		}
	}
	// A taken prefix is stepped over at once, however many subnets it has.
	wide := network(`{"Network": "10.0.0.0/8", "SubnetLen": 28, "EnableIPv6": true, "IPv6Network": "fc00::/16"}`)
	for taken, free := range map[string]bool{"10.0.0.0-8&fc00::-16": false, "10.0.0.0-8": false, "0.0.0.0-0": false, "10.5.9.0-24&::-0": false, "10.5.9.0-24&fc00::-32": true} {
		s, err := wide.choose(nil, []Subnet{subnet(taken)})
		if err == nil != free || err == nil && (!wide.fits(s) || s.overlaps(subnet(taken))) {
			t.Errorf("beside %s: %s, error %v", taken, s, err)
		}
	}
	if got := wide.Ranges[wire.IPv6].free(newTaken(wire.IPv6, 64, []Subnet{subnet("10.5.9.0-24&fc00::-17")})); len(got) != mostChoices || got[0] != netip.MustParsePrefix("fc00:8000::/64") {
		t.Errorf("behind a half that is taken are free %v", got)
	}
	large, drawn := network(`{"Network": "10.0.0.0/8"}`), map[Subnet]bool{}
	for range 50 {
		s, err := large.choose(nil, nil)
		if err != nil || !large.fits(s) {
			t.Fatalf("chosen %s, error %v", s, err)
		}
		drawn[s] = true
	}
	if len(drawn) < 45 {
		t.Errorf("of 50 choices %d are different", len(drawn))
	}
}

func TestEnvironment(t *testing.T) {
	path := t.TempDir() + "/made/subnet.env"
	e := Environment{
		Networks: [wire.Families]netip.Prefix{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParsePrefix("fc00::/48")},
		Subnets:  [wire.Families]netip.Prefix{netip.MustParsePrefix("10.5.52.0/24"), netip.MustParsePrefix("fc00:0:0:34::/64")},
		MTU:      1450,
	}
	for _, want := range []bool{true, false} {
		if changed, err := e.Write(path); err != nil || changed != want {
			t.Errorf("written: %v, want %v; error %v", changed, want, err)
		}
	}
	const want = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00:0:0:34::1/64\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
	if e.String() != want {
		t.Errorf("it says %q", e)
	}
	if s, err := readSubnet(path); err != nil || s != Subnet(e.Subnets) {
		t.Errorf("%v is read of it, error %v", s, err)
	}
	if s, err := readSubnet(path + ".none"); err != nil || s != (Subnet{}) {
		t.Errorf("%v is read of none, error %v", s, err)
	}
}
