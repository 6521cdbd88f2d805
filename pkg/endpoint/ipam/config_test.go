package ipam

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
)

func TestParseShapesOfRanges(t *testing.T) {
	for name, c := range map[string]struct {
		ipam string
		want []string
	}{
		"one range":            {`"ranges":[[{"subnet":"10.9.0.0/24"}]]`, []string{"10.9.0.1-10.9.0.254"}},
		"bounds":               {`"ranges":[[{"subnet":"10.9.0.0/24","rangeStart":"10.9.0.7","rangeEnd":"10.9.0.9"}]]`, []string{"10.9.0.7-10.9.0.9"}},
		"two ranges, one set":  {`"ranges":[[{"subnet":"10.9.0.0/24"},{"subnet":"10.9.2.0/24"}]]`, []string{"10.9.0.1-10.9.0.254,10.9.2.1-10.9.2.254"}},
		"dual stack":           {`"ranges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"fd00::/120"}]]`, []string{"10.9.0.1-10.9.0.254", "fd00::1-fd00::ff"}},
		"old form":             {`"subnet":"10.9.0.0/24"`, []string{"10.9.0.1-10.9.0.254"}},
		"old form with bounds": {`"subnet":"10.9.0.0/24","rangeStart":"10.9.0.7","gateway":"10.9.0.9"`, []string{"10.9.0.7-10.9.0.254"}},
		"old form and list":    {`"subnet":"10.9.0.0/24","ranges":[[{"subnet":"fd00::/120"}]]`, []string{"10.9.0.1-10.9.0.254", "fd00::1-fd00::ff"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := parse(t, `{"name":"n","ipam":{"type":"host-local",`+c.ipam+`}}`, "")
			var ranges []string
			for _, r := range got.Ranges {
				ranges = append(ranges, r.String())
			}
			if diff := cmp.Diff(c.want, ranges); diff != "" {
				t.Errorf("ranges (-want +got):\n%s", diff)
			}
		})
	}
	got := parse(t, `{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"}]]},"runtimeConfig":{"ipRanges":[[{"subnet":"fd00::/120"}]]}}`, "")
	if len(got.Ranges) != 2 || got.Ranges[0].String() != "fd00::1-fd00::ff" {
		t.Errorf("runtimeConfig.ipRanges: %v", got.Ranges)
	}
}

func TestParseRequested(t *testing.T) {
	const ranges = `"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"fd00::/120"}]]}`
	for name, c := range map[string]struct {
		conf, args string
		want       []string
	}{
		"none":               {`{` + ranges + `}`, "IgnoreUnknown=1;K8S_POD_NAME=a", nil},
		"args":               {`{` + ranges + `}`, "IgnoreUnknown=1;IP=10.9.0.5", []string{"10.9.0.5"}},
		"args with length":   {`{` + ranges + `}`, "IP=10.9.0.5/24", []string{"10.9.0.5"}},
		"empty args":         {`{` + ranges + `}`, "IP=", nil},
		"runtime":            {`{` + ranges + `,"runtimeConfig":{"ips":["10.9.0.5","fd00::5/120"]}}`, "", []string{"10.9.0.5", "fd00::5"}},
		"args of the config": {`{` + ranges + `,"args":{"cni":{"ips":["10.9.0.5"]}}}`, "", []string{"10.9.0.5"}},
		"twice the same":     {`{` + ranges + `,"runtimeConfig":{"ips":["10.9.0.5"]}}`, "IP=10.9.0.5", []string{"10.9.0.5"}},
		"mapped":             {`{` + ranges + `}`, "IP=::ffff:10.9.0.5", []string{"10.9.0.5"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, a := range parse(t, c.conf, c.args).Requested {
				got = append(got, a.String())
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("requested (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseNamesTheWrongField(t *testing.T) {
	one := `"ranges":[[{"subnet":"10.9.0.0/24"}]]`
	for conf, field := range map[string]string{
		`{"ipam":7}`:                 "ipam",
		`{"ipam":{}}`:                "ipam.ranges",
		`{}`:                         "ipam.ranges",
		`{"ipam":{"ranges":{}}}`:     "ipam.ranges",
		`{"ipam":{"ranges":[[]]}}`:   "ipam.ranges[0]",
		`{"ipam":{"ranges":[null]}}`: "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{}]]}}`: "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/33"}]]}}`:                                               "ipam.ranges",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.1/24"}]]}}`:                                               "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/31"}]]}}`:                                               "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"::ffff:10.9.0.0/120"}]]}}`:                                       "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24","rangeStart":"10.8.0.1"}]]}}`:                       "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24","rangeStart":"10.9.0.9","rangeEnd":"10.9.0.7"}]]}}`: "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"},{"subnet":"10.9.0.0/25"}]]}}`:                      "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"},{"subnet":"fd00::/64"}]]}}`:                        "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"10.8.0.0/24"}]]}}`:                    "ipam.ranges[1]",
		`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"fe80::/64"}]]}}`:                      "ipam.ranges[1]",
		`{"ipam":{"ranges":[[{"subnet":"ff05::/64"}]]}}`:                                                 "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"fd00::/127"}]]}}`:                                                "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"fd00::1/64"}]]}}`:                                                "ipam.ranges[0]",
		`{"ipam":{"ranges":[[{"subnet":"fd00::/64"}],[{"subnet":"fd01::/64"}]]}}`:                        "ipam.ranges[1]",
		`{"ipam":{"subnet":"x"}}`:                                                                        "ipam.subnet",
		`{"ipam":{"subnet":"10.9.0.0/24","gateway":"x"}}`:                                                "ipam.gateway",
		`{"ipam":{` + one + `,"routes":[{}]}}`:                                                           "ipam.routes[0].dst",
		`{"ipam":{` + one + `,"routes":[null]}}`:                                                         "ipam.routes[0].dst",
		`{"ipam":{` + one + `,"routes":[{"dst":"x"}]}}`:                                                  "ipam.routes",
		`{"ipam":{` + one + `,"resolvConf":1}}`:                                                          "ipam.resolvConf",
		`{"ipam":{` + one + `},"runtimeConfig":{"ips":[null]}}`:                                          "runtimeConfig.ips[0]",
		`{"ipam":{` + one + `},"runtimeConfig":{"ips":["x"]}}`:                                           "runtimeConfig.ips[0]",
		`{"ipam":{` + one + `},"runtimeConfig":{"ips":["10.9.0.5","10.9.0.6"]}}`:                         "runtimeConfig.ips[1]",
		`{"ipam":{` + one + `},"runtimeConfig":{"ips":["10.8.0.5"]}}`:                                    "runtimeConfig.ips[0]",
		`{"ipam":{` + one + `},"runtimeConfig":{"ips":["10.9.0.1"]}}`:                                    "runtimeConfig.ips[0]",
		`{"ipam":{` + one + `},"runtimeConfig":{"ipRanges":7}}`:                                          "runtimeConfig.ipRanges",
		`{"ipam":{` + one + `},"runtimeConfig":{"ipRanges":[[{"subnet":"x"}]]}}`:                         "runtimeConfig.ipRanges",
		`{"ipam":{"subnet":"fd00::/64"},"runtimeConfig":{"ips":["fd00::1"]}}`:                            "runtimeConfig.ips[0]",
		`{"ipam":{"subnet":"fd00::/64"},"runtimeConfig":{"ips":["fd00::"]}}`:                             "runtimeConfig.ips[0]",
		`{"ipam":{` + one + `},"args":{"cni":{"ips":["fe80::1%eth0"]}}}`:                                 "args.cni.ips[0]",
	} {
		var wrong *FieldError
		if _, err := Parse([]byte(conf), ""); !errors.As(err, &wrong) || wrong.Field != field {
			t.Errorf("%s: error %v, want one of field %s", conf, err, field)
		}
	}
	for _, args := range []string{"IP=x", "IP=10.8.0.1", "IP=10.9.0.1", "IP=10.9.0.2;IP=10.9.0.3"} {
		var wrong *ArgsError
		if _, err := Parse([]byte(`{"ipam":{`+one+`}}`), args); !errors.As(err, &wrong) {
			t.Errorf("CNI_ARGS %s: %v, want an error that says so", args, err)
		}
	}
}

func TestParseNotesUnknownFields(t *testing.T) {
	got := parse(t, `{"ipam":{"type":"host-local","dataDir":"/x","subnet":"10.9.0.0/24","zebra":1,"extra":{}}}`, "")
	if diff := cmp.Diff([]string{"ipam.extra", "ipam.zebra"}, got.Unknown); diff != "" {
		t.Error(diff)
	}
}

func TestResolvConf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	content := "# nameserver 1.1.1.1\nnameserver 192.0.2.53\n nameserver 192.0.2.54 x\ndomain a.test\n" +
		"search b.test\nsearch c.test d.test\noptions ndots:5 rotate\nbroken\n;\n\n"
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := ReadResolvConf(path)
	want := types.DNS{
		Nameservers: []string{"192.0.2.53", "192.0.2.54"}, Domain: "a.test",
		Search: []string{"c.test", "d.test"}, Options: []string{"ndots:5", "rotate"},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if _, err := ReadResolvConf(path + ".none"); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("missing file: %v", err)
	}
}

// FuzzParse: no input crashes the parser, and what it accepts is within its own ranges.
func FuzzParse(f *testing.F) {
	f.Add([]byte(small), "IP=10.9.0.5")
	f.Add([]byte(`{"ipam":{"ranges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"fd00::/64"}]]},"runtimeConfig":{"ips":["fd00::9"]}}`), "")
	f.Add([]byte(`{"ipam":{"subnet":"10.9.0.0/24","gateway":"10.9.0.3","routes":[{"dst":"0.0.0.0/0","gw":"10.9.0.3"}]}}`), "IgnoreUnknown=1")
	f.Add([]byte(`{"ipam":{"ranges":[[{"subnet":"::ffff:1.2.3.4/100"}]]},"args":{"cni":{"ips":[null]}}}`), "IP=;;=;IP")
	f.Fuzz(func(t *testing.T, conf []byte, args string) {
		c, err := Parse(conf, args)
		if err != nil {
			return
		}
		for i, set := range c.Ranges {
			for _, r := range set {
				if !r.Contains(r.RangeStart) || !r.Contains(r.RangeEnd) {
					t.Errorf("range %d %s is not within its subnet", i, r.String())
				}
			}
		}
		for _, a := range c.Requested {
			if i := c.setOf(a); i < 0 || c.requestedIn(i) != a {
				t.Errorf("requested %s is in no range, or one of two in it", a)
			}
		}
	})
}

// FuzzEntry: whatever stands in a store file, its owner is one that a file can be written for, or none.
func FuzzEntry(f *testing.F) {
	f.Add("pod\r\neth0", "10.9.0.5")
	f.Add("", "quarantine.10.9.0.5")
	f.Add("pod", "quarantine.quarantine.fd00::1")
	f.Add("\r\n", "..")
	f.Add("pod", "10.9.0.5")
	f.Fuzz(func(t *testing.T, content, name string) {
		if o, ok := parseOwner(content); ok != (o.ContainerID != "" && o.IfName != "") {
			t.Errorf("%q: owner %+v, %v", content, o, ok)
		}
		if name == "" || strings.ContainsAny(name, "/\x00") || len(name) > 255 || slices.Contains([]string{".", ".."}, name) {
			return
		}
		dir := t.TempDir()
		if os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600) != nil {
			return
		}
		list, err := read(dir)
		if err != nil || len(list) > 1 {
			t.Fatalf("%q: %v, %v", name, list, err)
		}
		for _, e := range list {
			if e.Address == (netip.Addr{}) || (e.State == Garbage) != (e.Owner == Owner{}) {
				t.Errorf("entry %+v of file %q", e, name)
			}
		}
	})
}
