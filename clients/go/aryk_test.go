package aryk_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	aryk "github.com/aryk/aryk/clients/go"
)

const (
	password = "secret: with a colon"
	patience = 20 * time.Second
)

// daemon is an arykd whose files are all in a temporary directory. The variable ARYKD names the program.
type daemon struct {
	t       *testing.T
	socket  string
	url     string
	command *exec.Cmd
	args    []string
}

func startDaemon(t *testing.T, more ...string) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "aryk")
	check(t, err)
	passwords := filepath.Join(dir, "passwords")
	check(t, os.WriteFile(passwords, []byte("test:"+password+"\n"), 0o600))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	address := free.Addr().String()
	check(t, free.Close())
	socket := filepath.Join(dir, "rpc.sock")
	args := []string{
		"--rpc-socket", socket, "--vhost-dir", filepath.Join(dir, "vhost"),
		"--rpc-http", address, "--rpc-http-auth", passwords, "--log", "error",
	}
	args = append(args, more...)
	d := &daemon{t: t, socket: socket, url: "http://" + address, args: args}
	d.start()
	t.Cleanup(func() {
		d.stop(syscall.SIGTERM)
		os.RemoveAll(dir)
	})
	return d
}

func (d *daemon) start() {
	d.t.Helper()
	d.command = exec.Command(os.Getenv("ARYKD"), d.args...)
	d.command.Stderr = os.Stderr
	check(d.t, d.command.Start())
	client := aryk.New(d.socket)
	defer client.Close()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if _, err := client.FrameworkWaitInit(context.Background()); err == nil {
			return
		} else if time.Now().After(deadline) {
			d.t.Fatalf("the daemon does not start: %v", err)
		}
	}
}

func (d *daemon) stop(signal syscall.Signal) {
	// The daemon may have ended already.
	_ = d.command.Process.Signal(signal)
	_ = d.command.Wait()
}

func (d *daemon) client(t *testing.T) *aryk.Client {
	client := aryk.New(d.socket)
	t.Cleanup(func() { client.Close() })
	return client
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t *testing.T, patience time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func null(name string) aryk.BdevNullCreateParams {
	return aryk.BdevNullCreateParams{Name: name, BlockSize: 512, NumBlocks: 2048}
}

func TestADiskFromItsMakingToItsEnd(t *testing.T) {
	client, ctx := startDaemon(t).client(t), within(t, patience)
	name, err := client.BdevNullCreate(ctx, null("d"))
	check(t, err)
	disks, err := client.BdevGetBdevs(ctx, aryk.BdevGetBdevsParams{Name: name})
	check(t, err)
	if len(disks) != 1 || disks[0].NumBlocks != 2048 || disks[0].Claimed || disks[0].ClaimedBy != nil {
		t.Fatalf("%+v", disks)
	}
	_, err = client.VhostCreateBlkController(ctx, aryk.VhostCreateBlkControllerParams{
		Ctrlr: "c", DevName: "d", Readonly: true, NumQueues: aryk.Ptr(uint16(3)), SocketMode: "600",
	})
	check(t, err)
	controllers, err := client.VhostGetControllers(ctx, aryk.VhostGetControllersParams{})
	check(t, err)
	c := controllers[0]
	if c.NumQueues != 3 || !c.BackendSpecific.Block.Readonly || *c.BackendSpecific.Block.Bdev != "d" {
		t.Fatalf("%+v", c)
	}
	info, err := os.Stat(c.Socket)
	check(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Fatal(info.Mode())
	}
	_, err = client.VhostDeleteController(ctx, aryk.VhostDeleteControllerParams{Ctrlr: "c"})
	check(t, err)
	deleted, err := client.BdevNullDelete(ctx, aryk.BdevNullDeleteParams{Name: "d"})
	check(t, err)
	disks, err = client.BdevGetBdevs(ctx, aryk.BdevGetBdevsParams{})
	check(t, err)
	if !deleted || len(disks) != 0 {
		t.Fatalf("%v %+v", deleted, disks)
	}
}

func TestErrorsAreTyped(t *testing.T) {
	client, ctx := startDaemon(t).client(t), within(t, patience)
	_, err := client.BdevNullDelete(ctx, aryk.BdevNullDeleteParams{Name: "nothing"})
	var told *aryk.Error
	if !errors.As(err, &told) || told.Code != -19 || told.Message != "No such device" {
		t.Fatal(err)
	}
	if !errors.Is(err, syscall.ENODEV) || !strings.Contains(told.Detail(), "nothing") {
		t.Fatal(err)
	}
	_, err = client.BdevNullCreate(ctx, null("twice"))
	check(t, err)
	if _, err = client.BdevNullCreate(ctx, null("twice")); !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	err = client.Call(ctx, "no_such_method", map[string]int{"a": 1}, nil)
	if !errors.As(err, &told) || told.Code != aryk.CodeMethodNotFound || told.Unwrap() != nil {
		t.Fatal(err)
	}
}

func TestEveryMethodIsThere(t *testing.T) {
	client, ctx := startDaemon(t).client(t), within(t, patience)
	names, err := client.RpcGetMethods(ctx, aryk.RpcGetMethodsParams{})
	check(t, err)
	for _, name := range names {
		if name == "rpc.discover" {
			// The generator of this client calls it; it has no name in Go.
			continue
		}
		function := ""
		for _, word := range strings.Split(name, "_") {
			function += strings.ToUpper(word[:1]) + word[1:]
		}
		if !reflect.ValueOf(client).MethodByName(function).IsValid() {
			t.Errorf("there is no %s for %s", function, name)
		}
	}
	if own := reflect.TypeOf(client).NumMethod() - 2; own != len(names)-1 {
		t.Errorf("%d methods, of which the daemon has %d", own, len(names))
	}
	version, err := client.SpdkGetVersion(ctx)
	check(t, err)
	if !strings.Contains(version.Version, aryk.APIVersion) {
		t.Errorf("%s is not %s", version.Version, aryk.APIVersion)
	}
}

func TestConfigurationGoesAround(t *testing.T) {
	client, ctx := startDaemon(t).client(t), within(t, patience)
	_, err := client.BdevNullCreate(ctx, null("saved"))
	check(t, err)
	saved, err := client.SaveConfig(ctx)
	check(t, err)
	_, err = client.BdevNullDelete(ctx, aryk.BdevNullDeleteParams{Name: "saved"})
	check(t, err)
	_, err = client.LoadConfig(ctx, aryk.LoadConfigParams{Subsystems: saved.Subsystems})
	check(t, err)
	_, err = client.BdevGetBdevs(ctx, aryk.BdevGetBdevsParams{Name: "saved"})
	check(t, err)
}

func TestGoroutinesShareAConnection(t *testing.T) {
	client, ctx := startDaemon(t).client(t), within(t, patience)
	// A waiting call does not delay other calls: their replies come first.
	waits := make(chan error)
	go func() {
		_, err := client.BdevGetBdevs(ctx, aryk.BdevGetBdevsParams{Name: "p299", Timeout: 10_000})
		waits <- err
	}()
	var all sync.WaitGroup
	for n := 0; n < 300; n++ {
		all.Add(1)
		go func(name string) {
			defer all.Done()
			if made, err := client.BdevNullCreate(ctx, null(name)); err != nil || made != name {
				t.Errorf("%s: %s %v", name, made, err)
			}
		}(fmt.Sprintf("p%d", n))
	}
	all.Wait()
	check(t, <-waits)
	for n := 0; n < 20; n++ {
		all.Add(1)
		go func() {
			defer all.Done()
			if disks, err := client.BdevGetBdevs(ctx, aryk.BdevGetBdevsParams{}); err != nil || len(disks) != 300 {
				t.Errorf("%d disks: %v", len(disks), err)
			}
		}()
	}
	all.Wait()
}

func TestCallsAreCancelledAndTimeOut(t *testing.T) {
	client, ctx := startDaemon(t).client(t), within(t, patience)
	never := aryk.BdevGetBdevsParams{Name: "never", Timeout: 300}
	if _, err := client.BdevGetBdevs(within(t, 50*time.Millisecond), never); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := client.BdevGetBdevs(cancelled, never); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := client.SpdkGetVersion(cancelled); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	// The late replies arrive here, and no call waits for them.
	never.Timeout = 400
	if _, err := client.BdevGetBdevs(ctx, never); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Fatal(err)
	}
}

func TestADaemonThatWasRestartedIsFoundAgain(t *testing.T) {
	daemon := startDaemon(t)
	client, ctx := daemon.client(t), within(t, patience)
	waits := make(chan error)
	for n := 0; n < 3; n++ {
		go func() {
			_, err := client.BdevGetBdevs(ctx, aryk.BdevGetBdevsParams{Name: "never", Timeout: 60_000})
			waits <- err
		}()
	}
	// The calls are in flight by then.
	time.Sleep(100 * time.Millisecond)
	daemon.stop(syscall.SIGKILL)
	var lost *aryk.ConnectionError
	for n := 0; n < 3; n++ {
		if err := <-waits; !errors.As(err, &lost) {
			t.Fatal(err)
		}
	}
	if _, err := client.SpdkGetVersion(ctx); !errors.As(err, &lost) {
		t.Fatal(err)
	}
	daemon.start()
	_, err := client.SpdkGetVersion(ctx)
	check(t, err)
	check(t, client.Close())
	if _, err := client.SpdkGetVersion(ctx); !errors.As(err, &lost) {
		t.Fatal(err)
	}
}

func TestHTTP(t *testing.T) {
	daemon, ctx := startDaemon(t), within(t, patience)
	client := aryk.New(daemon.url, aryk.WithBasicAuth("test", password))
	defer client.Close()
	_, err := client.BdevNullCreate(ctx, null("h"))
	check(t, err)
	if _, err = client.BdevNullCreate(ctx, null("h")); !errors.Is(err, syscall.EEXIST) {
		t.Fatal(err)
	}
	never := aryk.BdevGetBdevsParams{Name: "never", Timeout: 300}
	if _, err := client.BdevGetBdevs(within(t, 50*time.Millisecond), never); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	stranger := aryk.New(daemon.url, aryk.WithBasicAuth("test", "wrong"))
	defer stranger.Close()
	var refused *aryk.HTTPError
	if _, err = stranger.SpdkGetVersion(ctx); !errors.As(err, &refused) || refused.StatusCode != 401 {
		t.Fatal(err)
	}
	var lost *aryk.ConnectionError
	if _, err = aryk.New("http://127.0.0.1:1").SpdkGetVersion(ctx); !errors.As(err, &lost) {
		t.Fatal(err)
	}
}

// certify creates a certificate for this host, and returns its file, its key's file, and a client that trusts it.
func certify(t *testing.T) (string, string, *http.Client) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	check(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	check(t, err)
	dir := t.TempDir()
	write := func(name, kind string, content []byte) string {
		path := filepath.Join(dir, name)
		text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content})
		check(t, os.WriteFile(path, text, 0o600))
		return path
	}
	parsed, err := x509.ParseCertificate(certificate)
	check(t, err)
	trusted := x509.NewCertPool()
	trusted.AddCert(parsed)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: trusted}}}
	return write("certificate", "CERTIFICATE", certificate), write("key", "PRIVATE KEY", secret), client
}

func TestEncryptedHTTP(t *testing.T) {
	certificate, key, trusting := certify(t)
	daemon, ctx := startDaemon(t, "--rpc-http-tls-cert", certificate, "--rpc-http-tls-key", key), within(t, patience)
	url, who := strings.Replace(daemon.url, "http:", "https:", 1), aryk.WithBasicAuth("test", password)
	client := aryk.New(url, who, aryk.WithHTTPClient(trusting))
	defer client.Close()
	_, err := client.SpdkGetVersion(ctx)
	check(t, err)
	var lost *aryk.ConnectionError
	if _, err := aryk.New(url, who).SpdkGetVersion(ctx); !errors.As(err, &lost) {
		t.Fatal(err)
	}
}
