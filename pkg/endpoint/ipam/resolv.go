package ipam

import (
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// ReadResolvConf reads a pod's DNS settings from a file in the format of resolv.conf.
func ReadResolvConf(path string) (types.DNS, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return types.DNS{}, fmt.Errorf("read resolver configuration: %w", err)
	}
	return parseResolvConf(string(content)), nil
}

// parseResolvConf ignores what it does not know, as the C library does; the last domain and search lines win.
func parseResolvConf(content string) types.DNS {
	var dns types.DNS
	for line := range strings.Lines(content) {
		fields := strings.Fields(line)
		if len(fields) < 2 || strings.ContainsAny(fields[0][:1], "#;") {
			continue
		}
		switch fields[0] {
		case "nameserver":
			dns.Nameservers = append(dns.Nameservers, fields[1])
		case "domain":
			dns.Domain = fields[1]
		case "search":
			dns.Search = fields[1:]
		case "options":
			dns.Options = append(dns.Options, fields[1:]...)
		}
	}
	return dns
}
