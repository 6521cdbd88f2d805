package modes

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
)

// service is a Service with one ready endpoint. What a packet that is for none of them costs does not depend on the
// number of endpoints.
type service struct {
	name     string // namespace/name
	cluster  netip.Addr
	endpoint netip.Addr
}

const (
	servicePort  = 80
	endpointPort = 8080
)

// services are k of them; their endpoints are on far nodes.
func services(k int) []service {
	all := make([]service, k)
	for i := range all {
		all[i] = service{
			name:     fmt.Sprintf("default/service-%d", i),
			cluster:  plus(serviceCIDR.Addr(), uint32(i)+10),
			endpoint: plus(clusterCIDR.Addr(), uint32(i)+10),
		}
	}
	return all
}

func plus(a netip.Addr, n uint32) netip.Addr {
	raw := a.As4()
	binary.BigEndian.PutUint32(raw[:], binary.BigEndian.Uint32(raw[:])+n)
	return netip.AddrFrom4(raw)
}

// hash names a chain as kube-proxy does: so many letters and digits that depend on what the chain is for.
func hash(of string, length int) string {
	sum := sha256.Sum256([]byte(of))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
}

// rules collects lines.
type rules struct{ strings.Builder }

func (r *rules) add(format string, args ...any) {
	fmt.Fprintf(r, format, args...)
	r.WriteByte('\n')
}
