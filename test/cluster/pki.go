package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// authority signs everybody's certificate.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
	pem  []byte
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert := template("ebpf-cni-cluster")
	cert.IsCA, cert.BasicConstraintsValid = true, true
	cert.KeyUsage |= x509.KeyUsageCertSign
	a := &authority{cert: cert, key: key}
	raw, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return nil, err
	}
	a.pem = encode("CERTIFICATE", raw)
	return a, nil
}

func template(name string, groups ...string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name, Organization: groups}, //nolint:misspell // the name of a field
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
}

func encode(kind string, raw []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw})
}

// sign makes a certificate and its key.
func (a *authority) sign(cert *x509.Certificate) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	raw, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	rawKey, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return encode("CERTIFICATE", raw), encode("EC PRIVATE KEY", rawKey), nil
}

// writePKI writes ca.crt, apiserver.crt and .key, and service-accounts.key.
func (c *Cluster) writePKI() (err error) {
	if c.ca, err = newAuthority(); err != nil {
		return err
	}
	server := template("kube-apiserver", "system:masters")
	server.IPAddresses = []net.IP{c.apiAddr().AsSlice(), net.IPv4(127, 0, 0, 1), host(c.network().services, apiNumber).AsSlice()}
	server.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	cert, key, err := c.ca.sign(server)
	if err != nil {
		return err
	}
	_, accounts, err := c.ca.sign(template("service-accounts"))
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"ca.crt": c.ca.pem, "apiserver.crt": cert, "apiserver.key": key, "service-accounts.key": accounts,
	} {
		if err := os.WriteFile(filepath.Join(c.Dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

const kubeconfigText = `apiVersion: v1
kind: Config
clusters: [{name: ebpf-cni, cluster: {server: "https://%s", certificate-authority-data: %s}}]
users: [{name: user, user: {client-certificate-data: %s, client-key-data: %s}}]
contexts: [{name: ebpf-cni, context: {cluster: ebpf-cni, user: user}}]
current-context: ebpf-cni
`

// writeKubeconfig writes the file by which a user of that name speaks to the API, and returns its path.
func (c *Cluster) writeKubeconfig(file, user string, groups ...string) (string, error) {
	cert, key, err := c.ca.sign(template(user, groups...))
	if err != nil {
		return "", err
	}
	text := base64.StdEncoding.EncodeToString
	path := filepath.Join(c.Dir, file+".kubeconfig")
	content := fmt.Sprintf(kubeconfigText, netip.AddrPortFrom(c.apiAddr(), apiPort), text(c.ca.pem), text(cert), text(key))
	return path, os.WriteFile(path, []byte(content), 0o600)
}
